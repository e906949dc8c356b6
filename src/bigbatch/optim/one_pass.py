"""r and the step of torch's SGD, Adam or AdamW in one kernel pass over each parameter."""

import itertools
import operator
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bigbatch.gradients.grad_guard import is_tensor
from bigbatch.kernels import native
from bigbatch.kernels.native import Rule
from bigbatch.optim.apply_gsnr import Layers, kernel_values
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.sharding import AllReduce

_RULES = {SGD: Rule.GSNR_SGD, Adam: Rule.GSNR_ADAM, AdamW: Rule.GSNR_ADAM}
_OTHER_STEPS = ("differentiable", "amsgrad", "capturable")  # that torch does itself


@dataclass
class GroupShare:
    """The parameters of a group that have a gradient in the step."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]  # on this rank
    all_reduce: AllReduce | None
    layers: Layers = field(init=False)  # with their moments


class _Column:
    """Arrays that the kernels could read in the step before, if nothing about them has changed."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Tensor]] = []  # a state that is replaced is not kept alive
        self._addresses = array("q")

    def find(
        self, tensors: Sequence[Tensor], like: Sequence[Tensor], lengths: "array[int]"
    ) -> "array[int] | None":
        """The addresses of tensors shaped `like` others; None if the kernels cannot read them."""
        addresses = native.addresses(tensors)
        is_contiguous = all(map(Tensor.is_contiguous, tensors))
        if (
            is_contiguous
            and addresses == self._addresses
            and all(map(operator.is_, tensors, map(weakref.ref.__call__, self._refs)))
            and native.lengths(tensors) == lengths
        ):
            return addresses
        fits = native.fits(like, tensors)
        keeps = fits and is_contiguous
        self._refs = list(map(weakref.ref, tensors)) if keeps else []
        self._addresses = addresses if keeps else array("q")
        return addresses if fits else None


class OnePass:
    """Finds the kernel calls that do the base optimizer's step.

    It is torch's fused step on r g, to rounding. Torch does the step itself where something may
    see it, or where it does more: hooks, a subclass or a replaced `step`, a GradScaler's found_inf,
    the first step, which makes the state, and settings that choose another implementation.
    """

    def __init__(self, state: GsnrState) -> None:
        self._state = state
        self._columns: dict[tuple[int, int], _Column] = defaultdict(_Column)

    def find(self, shares: Sequence[GroupShare]) -> list[Callable[[], None]] | None:
        """Calls that replace each gradient by r g and step the parameters; None if torch has to."""
        if not self._is_possible():
            return None
        calls = []
        for number, share in enumerate(shares):
            call = self._find(number, share)
            if call is None:
                return None
            calls.append(call)
        return calls

    def _is_possible(self) -> bool:
        """Whether nothing but the arrays of a group can prevent it."""
        base: Any = self._state.base
        return (
            type(base) in _RULES
            and not self._state.watch
            and self._state.uses_kernels
            and "step" not in vars(base)
            and not (base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks)
            and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
            and vars(base).get("found_inf") is None
            and all(map(_may_replace, base.param_groups))
        )

    def _find(self, number: int, share: GroupShare) -> Callable[[], None] | None:
        """The call for a group; None if the kernels cannot read its arrays."""
        base: Any = self._state.base
        rule, group, parameters = _RULES[type(base)], share.group, share.parameters
        layers, weight = share.layers, self._state.moments.weight
        names = _state_names(rule, group)
        states = list(map(base.state.get, parameters)) if names else []
        try:
            shaped: list[Any] = [list(map(operator.itemgetter(name), states)) for name in names]
        except (KeyError, TypeError):  # the first step of a parameter
            return None
        if not all(map(is_tensor, itertools.chain.from_iterable(shaped))):
            return None
        steps = shaped.pop() if rule is Rule.GSNR_ADAM else []
        totals, m2s, gradients = layers.totals, layers.m2s, layers.gradients
        known, totals_at = self._state.moments.kernel_columns(parameters), native.addresses(totals)
        if known is None or known[1] != totals_at:
            if not native.fits(totals, m2s):
                return None
            known = native.lengths(m2s), totals_at, native.addresses(m2s)
        is_sum = all(map(operator.is_, totals, gradients))
        if not (is_sum or native.fits(m2s, gradients)) or not native.are_plain(steps):
            return None
        none = array("q", bytes(8 * len(parameters)))
        gradients_at = totals_at if is_sum else native.addresses(gradients)
        lengths, columns = known[0], [*known[1:], gradients_at]
        for place, tensors in enumerate((layers.averages, parameters, *shaped)):
            column = self._columns[number, place]
            found = column.find(tensors, m2s, lengths) if tensors else none
            if found is None:
                return None
            columns.append(found)
        if steps:
            columns.append(native.addresses(steps))
        layer_values = itertools.chain.from_iterable(layers.layer_values)
        values = [*kernel_values(group, weight), *_step_values(rule, group)]

        def call() -> None:
            native.run_at(rule, columns, lengths, values, layer_values)
            increment_version([*parameters, *gradients, *(layers.averages or ())])
            if steps:
                torch._foreach_add_(steps, 1)

        return call


def _state_names(rule: Rule, group: dict[str, Any]) -> tuple[str, ...]:
    """The states that the kernel reads, by column, and last Adam's counter of steps."""
    if rule is Rule.GSNR_ADAM:
        return "exp_avg", "exp_avg_sq", "step"
    return ("momentum_buffer",) if group["momentum"] else ()


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
