"""Torch's fused steps: where they do what its other steps do, and where they do not."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, Optimizer

from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.optim.sharding import is_sharded, local

_TORCHS = (SGD, Adam, Adagrad)  # optimizers with a fused step for CPUs


def can_fuse(base: Optimizer, parameter: Tensor) -> bool:
    """Whether torch's fused step is known to be right for a parameter.

    That is a dense float with gradients of its type: float32 or float64 on a CPU, any on CUDA.
    Torch's fused SGD takes no sharded ones.
    """
    return (
        parameter.is_floating_point()
        and parameter.grad_dtype in (None, parameter.dtype)
        and (parameter.is_cuda or (parameter.is_cpu and parameter.dtype in FULL_PRECISION))
        and not (is_sharded(parameter) and isinstance(base, SGD))
        and _is_dense(local(parameter))
    )


class BaseStep:
    """The step of a base optimizer, without its fused kernel where that misreads memory.

    Args:
        base: the optimizer.
        warns: whether to say so; not to those who did not choose to fuse.
    """

    def __init__(self, base: Optimizer, *, warns: bool) -> None:
        self._base, self._warns = base, warns

    def __call__(self) -> None:
        """Takes it."""
        fused = [group for group in self._base.param_groups if group.get("fused")]
        wrong = [(group, why) for group in fused if (why := _misread(self._base, group))]
        if wrong and self._warns:
            self._warns = False
            warnings.warn(
                f"{type(self._base).__name__}(fused=True) {wrong[0][1]}, so it steps without "
                "its fused kernel there; leave fused=True out",
                stacklevel=6,
            )
        for group, _ in wrong:
            group["fused"] = False
        try:
            self._base.step()
        finally:
            for group, _ in wrong:
                group["fused"] = True
        increment_version([p for group in fused for p in group["params"]])  # torch's leave it out


def _misread(base: Optimizer, group: dict[str, Any]) -> str:
    """What torch's fused step gets wrong of a group as it is now; empty for nothing.

    On a CPU it goes through the memory of a parameter, its gradient and its state as if their
    elements lay in one order and without gaps. SGD's then skips most of a half type (pytorch issue
    191763), and takes a momentum of all parameters or of none.
    """
    if not isinstance(base, _TORCHS):
        return ""
    states: Any = base.state
    begun = set()
    for p in group["params"]:
        if p.grad is None:
            continue
        state = states.get(p, {})
        begun.add(state.get("momentum_buffer") is not None)
        if not p.is_cpu:
            continue
        if isinstance(base, SGD) and p.dtype not in FULL_PRECISION:
            return f"does not move most of a {p.dtype} parameter on a CPU"
        arrays = [x for x in state.values() if isinstance(x, Tensor) and x.ndim]
        if not _lie_alike(p, [p.grad, *arrays]):
            return "mixes up elements on a CPU that lie otherwise in a gradient or in the state"
    if len(begun) > 1 and group.get("momentum"):
        return "takes no momentum that has begun for some parameters only"
    return ""


def _lie_alike(first: Any, others: Sequence[Any]) -> bool:
    """Whether the elements of all lie in one order, without gaps."""
    if is_sharded(first):
        first, others = local(first), [local(t) for t in others]
    shape, contiguous = first.shape, first.is_contiguous()
    strides = () if contiguous else first.stride()
    for t in others:  # not by all(): over many small ones, looking is what costs
        if t.shape != shape or not (t.is_contiguous() if contiguous else t.stride() == strides):
            return False
    return contiguous or _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a run of memory, each once, in whichever order."""
    if tensor.layout is not torch.strided:
        return False
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).is_contiguous()
