"""Torch's fused optimizer steps: when they are right, and a step that avoids the wrong ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, Optimizer

from bigbatch.gradients.auto import is_sharded
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.sharding import local

_FUSED_ON_CPU = (SGD, Adam, Adagrad)


def can_fuse(base: Optimizer, parameter: Tensor) -> bool:
    """Whether torch's fused step is known to be right for a parameter.

    The parameter must be dense, with gradients of its type: float32 or float64 on a CPU, any float
    on CUDA. Torch's fused SGD takes no sharded parameters.
    """
    return (
        parameter.is_floating_point()
        and parameter.grad_dtype in (None, parameter.dtype)
        and (parameter.is_cuda or (parameter.is_cpu and parameter.dtype in FULL_PRECISION))
        and not (is_sharded(parameter) and isinstance(base, SGD))
        and _is_dense(local(parameter))
    )


class BaseStep:
    """The step of a base optimizer, without its fused kernel if that would misread memory."""

    def __init__(self, base: Optimizer, *, warns: bool) -> None:
        self._base, self._warns = base, warns

    def __call__(self) -> None:
        """Steps the base optimizer."""
        fused = [group for group in self._base.param_groups if group.get("fused")]
        faults = [(group, fault) for group in fused if (fault := _find_fault(self._base, group))]
        if faults and self._warns:
            self._warns = False
            warn_in_loop(
                f"{type(self._base).__name__}(fused=True) {faults[0][1]}, so it steps without "
                "its fused kernel there; leave fused=True out"
            )
        for group, _ in faults:
            group["fused"] = False
        try:
            self._base.step()
        finally:
            for group, _ in faults:
                group["fused"] = True
        increment_version([p for group in fused for p in group["params"]])  # torch's steps do not


def _find_fault(base: Optimizer, group: dict[str, Any]) -> str:
    """What torch's fused step would do wrong with a group in its present state; empty for nothing.

    On a CPU the step assumes that the elements of a parameter, its gradient and its state have the
    same order in memory, without gaps. SGD's also skips most elements of half types (pytorch issue
    191763), and needs a momentum buffer for all parameters or for none.
    """
    if not isinstance(base, _FUSED_ON_CPU):
        return ""
    states: Any = base.state
    have_momentum = set()
    for p in group["params"]:
        if p.grad is None:
            continue
        state = states.get(p, {})
        have_momentum.add(state.get("momentum_buffer") is not None)
        if not p.is_cpu:
            continue
        if isinstance(base, SGD) and p.dtype not in FULL_PRECISION:
            return f"does not move most of a {p.dtype} parameter on a CPU"
        arrays = [x for x in state.values() if isinstance(x, Tensor) and x.ndim]
        if not _same_layout(p, [p.grad, *arrays]):
            return "mixes up elements on a CPU whose order differs in a gradient or in the state"
    if len(have_momentum) > 1 and group.get("momentum"):
        return "takes no momentum that has begun for some parameters only"
    return ""


def _same_layout(first: Any, others: Sequence[Any]) -> bool:
    """Whether the elements of all tensors have the same order in memory, without gaps."""
    if is_sharded(first):
        first, others = local(first), [local(t) for t in others]
    shape, contiguous = first.shape, first.is_contiguous()
    strides = () if contiguous else first.stride()
    for t in others:  # not by all(), which is slow over many small tensors
        if t.shape != shape or not (t.is_contiguous() if contiguous else t.stride() == strides):
            return False
    return contiguous or _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps, in any order."""
    if tensor.layout is not torch.strided:
        return False
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).is_contiguous()
