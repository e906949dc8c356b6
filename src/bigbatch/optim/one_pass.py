"""r and the step of torch's SGD, Adam or AdamW in one kernel pass over each parameter."""

import operator
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bigbatch.gradients.grad_guard import is_tensor
from bigbatch.kernels import native
from bigbatch.kernels.native import Rule
from bigbatch.optim.apply_gsnr import GsnrOptions, Layers
from bigbatch.statistics.second_moment import GradientMoments

_RULES = {SGD: Rule.GSNR_SGD, Adam: Rule.GSNR_ADAM, AdamW: Rule.GSNR_ADAM}
_OTHER_STEPS = ("differentiable", "amsgrad", "capturable")  # that torch does itself


Call = Callable[[], None]
"""Replaces each gradient of a group by r g, and steps the parameters."""


class _Column:
    """Arrays that the kernels could read in the step before, if nothing about them has changed."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Tensor]] = []  # a state that is replaced is not kept alive
        self._addresses = array("q")

    def find(self, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> "array[int] | None":
        """The addresses of tensors of these shapes; None if the kernels cannot read them."""
        addresses = native.addresses(tensors)
        is_contiguous = set(map(Tensor.is_contiguous, tensors)) == {True}
        if (
            is_contiguous
            and addresses == self._addresses
            and all(map(operator.is_, tensors, map(weakref.ref.__call__, self._refs)))
            and native.lengths(tensors) == native.lengths(like)
        ):
            return addresses
        fits = native.fits(like, tensors)
        keeps = fits and is_contiguous
        self._refs = list(map(weakref.ref, tensors)) if keeps else []
        self._addresses = addresses if keeps else array("q")
        return addresses if fits else None


class OnePass:
    """Finds the kernel call that does the base optimizer's step of a group.

    It is torch's fused step on r g, to rounding. Torch does the step itself where something may
    see it, or where it does more: hooks, a subclass or a replaced `step`, a GradScaler's found_inf,
    the first step, which makes the state, and settings that choose another implementation.
    """

    def __init__(self, base: Optimizer, moments: GradientMoments) -> None:
        self._base, self._moments = base, moments
        self._columns: dict[tuple[int, int], _Column] = {}

    def is_possible(self) -> bool:
        """Whether nothing but the arrays of a group can prevent it."""
        base: Any = self._base
        return (
            type(base) in _RULES
            and "step" not in vars(base)
            and not (base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks)
            and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
            and vars(base).get("found_inf") is None
            and all(map(_may_replace, base.param_groups))
        )

    def find(
        self,
        number: int,
        group: dict[str, Any],
        parameters: list[Tensor],
        options: GsnrOptions,
        layers: Layers,
    ) -> Call | None:
        """The call for the group with this number; None if the kernels cannot read its arrays."""
        base: Any = self._base
        rule = _RULES[type(base)]
        try:
            states = self._states(rule, group, parameters)
        except (KeyError, TypeError):  # the first step of a parameter
            return None
        if states is None:
            return None
        *shaped, steps = states
        totals, m2s, gradients = layers.totals, layers.m2s, layers.gradients
        totals_at, gradients_at = native.addresses(totals), native.addresses(gradients)
        columns: list[array[int] | None] = [totals_at, native.addresses(m2s), gradients_at]
        if not self._moments.have_read(parameters, totals_at) and not native.fits(totals, m2s):
            return None
        if gradients_at != totals_at and not native.fits(m2s, gradients):
            return None
        for place, tensors in enumerate((layers.averages, parameters, *shaped)):
            column = self._columns.setdefault((number, place), _Column())
            found = None if tensors is None else column.find(tensors, m2s)
            if found is None and tensors is not None:
                return None
            columns.append(found)
        if steps:
            if not native.are_plain(steps):
                return None
            columns.append(native.addresses(steps))
        layer_values = [value for pair in layers.layer_values for value in pair]
        values = [*options.values, *_step_values(rule, group)]

        def call() -> None:
            native.run_at(rule, columns, native.lengths(m2s), values, layer_values)
            increment_version([*parameters, *gradients, *(layers.averages or ())])
            if steps:
                torch._foreach_add_(steps, 1)

        return call

    def _states(
        self, rule: Rule, group: dict[str, Any], parameters: list[Tensor]
    ) -> list[Any] | None:
        """The state of the parameters by column, and last Adam's counters of steps."""
        states: Any = self._base.state
        if rule is Rule.GSNR_SGD:
            if not group["momentum"]:
                return [None, []]
            rows = list(map(states.get, parameters))
            buffers = [row["momentum_buffer"] for row in rows]
            return [buffers, []] if all(map(is_tensor, buffers)) else None
        rows = list(map(states.get, parameters))
        names = "exp_avg", "exp_avg_sq", "step"
        return [[row[name] for row in rows] for name in names]


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
