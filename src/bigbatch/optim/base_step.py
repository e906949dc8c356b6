"""The base optimizer's step: torch's, fused where that is right, or one kernel pass with r."""

import itertools
import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bigbatch.gradients.auto import is_sharded
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.gradients.grad_guard import is_tensor
from bigbatch.kernels import native
from bigbatch.kernels.native import Rule
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.apply_gsnr import Layers, kernel_values
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.optimizer_settings import parts_of
from bigbatch.optim.sharding import AllReduce, local

_RULES = {SGD: Rule.GSNR_SGD, Adam: Rule.GSNR_ADAM, AdamW: Rule.GSNR_ADAM}
_STATES = {  # that a kernel reads, by column, and last Adam's counter of steps
    Rule.GSNR_SGD: ("momentum_buffer",),
    Rule.GSNR_ADAM: ("exp_avg", "exp_avg_sq", "step"),
}
_FUSED_ON_CPU = (SGD, Adam, Adagrad)
_DTYPE = operator.attrgetter("dtype")
_OTHER_STEPS = ("differentiable", "amsgrad", "capturable")  # that torch does itself


@dataclass
class GroupShare:
    """The parameters of a group that have a gradient in the step."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]  # on this rank
    all_reduce: AllReduce | None
    layers: Layers = field(init=False)  # with their moments


class OnePass:
    """Finds the kernel calls that do the base optimizer's step.

    It is torch's fused step on r g, to rounding. Torch does the step itself where something may
    see it, or where it does more: hooks, a subclass or a replaced `step`, a GradScaler's found_inf,
    the first step, which makes the state, and settings that choose another implementation.
    """

    def __init__(self, state: GsnrState) -> None:
        self._state = state
        self._read: dict[int, Any] = {}  # where the arrays of each group lay in the step before

    def find(self, shares: Sequence[GroupShare]) -> list[Callable[[], Tensor | None]] | None:
        """Calls that replace each gradient by r g and step the parameters; None if torch has to.

        They return the row of each parameter, as of `apply_gsnr`, if watched.
        """
        base: Any = self._state.base
        is_possible = (
            type(base) in _RULES
            and self._state.uses_kernels
            and "step" not in vars(base)
            and not (base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks)
            and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
            and vars(base).get("found_inf") is None
            and all(map(_may_replace, base.param_groups))
        )
        if not is_possible:
            return None
        calls = [self._find(number, share) for number, share in enumerate(shares)]
        return None if None in calls else calls  # type: ignore[return-value]

    def _find(self, number: int, share: GroupShare) -> Callable[[], Tensor | None] | None:
        """The call of a group; None if the kernels cannot read its arrays."""
        base: Any = self._state.base
        rule, moments, watch = _RULES[type(base)], self._state.moments, self._state.watch
        group, parameters, layers = share.group, share.parameters, share.layers
        gradients, averages = layers.gradients, layers.averages or ()
        names = _STATES[rule] if rule is Rule.GSNR_ADAM or group["momentum"] else ()
        states = list(map(base.state.get, parameters)) if names else []
        try:
            shaped: list[Any] = [list(map(operator.itemgetter(name), states)) for name in names]
        except (KeyError, TypeError):  # the first step of a parameter
            return None
        if not all(map(is_tensor, itertools.chain.from_iterable(shaped))):
            return None
        steps = shaped.pop() if rule is Rule.GSNR_ADAM else []
        read, totals = moments.kernel_columns(parameters), native.addresses(layers.totals)
        is_sum = all(map(operator.is_, layers.totals, gradients))
        if (
            (read is None or read[1] != totals)
            or not (is_sum or native.fits(layers.m2s, gradients))
            or not native.are_plain(steps)
        ):
            return None
        kept = self._addresses(number, [averages, parameters, *shaped], layers.m2s)
        if kept is None:
            return None
        columns = [totals, read[2], native.addresses(gradients), *kept, native.addresses(steps)]
        values = [*kernel_values(group, moments.weight), *_step_values(rule, group)]

        def call() -> Tensor | None:
            own = itertools.chain.from_iterable(layers.layer_values)
            used = [column or None for column in columns]
            numbers = native.run_at(rule, used, read[0], values, own, watch=watch)
            increment_version([*parameters, *gradients, *averages])
            if steps:
                torch._foreach_add_(steps, 1)
            return native.stats_of(numbers, read[0]) if watch else None

        return call

    def _addresses(
        self, number: int, columns: list[Sequence[Tensor]], like: Sequence[Tensor]
    ) -> "list[array[int]] | None":
        """Where arrays that stay from step to step lie; None if the kernels cannot read them."""
        arrays = list(itertools.chain.from_iterable(columns))
        places = list(map(native.addresses, columns)), native.lengths(arrays)
        is_usual = set(map(_DTYPE, arrays)) <= {torch.float32} and all(
            map(Tensor.is_contiguous, arrays)
        )
        if not is_usual or places != self._read.get(number):  # else they are those of before
            if not native.fits(like, *filter(None, columns)):
                return None
            self._read[number] = places if is_usual else None
        return places[0]


def _may_replace(group: dict[str, Any]) -> bool:
    """Whether the settings of a group leave torch's implementation of the step open."""
    return (
        group["vr"]
        and (group["gamma"] < 1 or group["r_max"] > 1)  # else it is torch's step to the bit
        and (group["fused"] or (group["fused"] is None and group["foreach"] is None))
        and not any(map(group.get, _OTHER_STEPS))
        and (not isinstance(group["lr"], Tensor) or group["lr"].is_cpu)
    )


def _step_values(rule: Rule, group: dict[str, Any]) -> list[float]:
    """The numbers of the base optimizer's step, in the kernel's order."""
    sign = -1.0 if group["maximize"] else 1.0
    values = [float(group["lr"]), float(group["weight_decay"]), sign]
    if rule is Rule.GSNR_SGD:
        return values + [float(group[name]) for name in ("momentum", "dampening", "nesterov")]
    decoupled = float(group["decoupled_weight_decay"])
    return [*values, *map(float, group["betas"]), float(group["eps"]), decoupled]


def can_fuse(base: Optimizer, parameter: Tensor) -> bool:
    """Whether torch's fused step is known to be right for a parameter and gradients of its type."""
    return (
        parameter.is_floating_point()
        and parameter.grad_dtype in (None, parameter.dtype)
        and (parameter.is_cuda or (parameter.is_cpu and parameter.dtype in FULL_PRECISION))
        and not (is_sharded(parameter) and isinstance(base, SGD))  # which torch refuses
        and _is_dense(local(parameter))
    )


class BaseStep:
    """The step of a base optimizer, without its fused kernel if that would misread memory."""

    def __init__(self, base: Optimizer, *, warns: bool) -> None:
        self._base, self._warns, self._parts = base, warns, parts_of(base)

    def __call__(self) -> None:
        """Steps the base optimizer."""
        fused = [(part, g) for part in self._parts for g in part.param_groups if g.get("fused")]
        faults = [(*pair, fault) for pair in fused if (fault := _find_fault(*pair))]
        if faults and self._warns:
            self._warns = False
            warn_in_loop(
                f"{type(faults[0][0]).__name__}(fused=True) {faults[0][2]}, so it steps without "
                "its fused kernel there; leave fused=True out"
            )
        for _, group, _ in faults:
            group["fused"] = False
        try:
            self._base.step()
        finally:
            for _, group, _ in faults:
                group["fused"] = True
        increment_version(
            [p for _, group in fused for p in group["params"]]
        )  # torch's steps do not


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
    """Whether all tensors have their elements in the same order in memory, without gaps."""
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
    is_strided = tensor.layout is torch.strided
    return is_strided and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
