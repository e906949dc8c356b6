"""r and the step of torch's SGD, Adam or AdamW in one kernel pass over each parameter."""

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bigbatch.gradients.grad_sums import is_tensor
from bigbatch.kernels import native
from bigbatch.kernels.native import Rule
from bigbatch.optim.apply_gsnr import GsnrOptions, Layers
from bigbatch.statistics.second_moment import GradientMoments

_RULES = {SGD: Rule.GSNR_SGD, Adam: Rule.GSNR_ADAM, AdamW: Rule.GSNR_ADAM}
_OTHER_STEPS = ("differentiable", "amsgrad", "capturable")  # that torch does itself


@dataclass
class _Column:
    """Arrays that the kernels could read in the step before, if nothing about them has changed."""

    tensors: list[Tensor] = field(default_factory=list)
    addresses: "array[int]" = field(default_factory=lambda: array("q"))

    def find(self, tensors: Sequence[Tensor], shapes: Sequence[Tensor]) -> "array[int] | None":
        """The addresses of tensors of these shapes; None if the kernels cannot read them."""
        found = native.addresses(tensors)
        if (
            found == self.addresses
            and len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and set(map(Tensor.is_contiguous, tensors)) == {True}
        ):
            return found
        self.tensors, self.addresses = [], array("q")
        if not native.fits(shapes, tensors):
            return None
        if set(map(Tensor.is_contiguous, tensors)) == {True}:
            self.tensors, self.addresses = list(tensors), found
        return found


@dataclass
class Call:
    """A kernel call that steps one group."""

    rule: Rule
    columns: "list[array[int] | None]"
    elements: "array[int]"
    group_values: list[float]
    layer_values: list[float]
    written: list[Tensor]  # whose versions the call increments
    steps: list[Tensor]  # Adam's counters of steps

    def run(self) -> None:
        """Replaces each gradient by r g, and steps the parameters."""
        native.run_at(
            self.rule,
            self.columns,
            self.elements,
            self.group_values,
            self.layer_values,
            threads=native.threads_for(sum(self.elements)),
        )
        increment_version(self.written)
        if self.steps:
            torch._foreach_add_(self.steps, 1)


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
        m2s = layers.m2s
        checked = self._moments.checked_addresses(parameters)
        first = native.addresses(layers.totals)
        if checked is None or checked[0] != first:
            if not native.fits(layers.totals, m2s):
                return None
            checked = first, native.addresses(m2s), native.lengths(m2s)
        columns: list[array[int] | None] = [*checked[:2]]
        gradients = native.addresses(layers.gradients)
        if gradients != first and not native.fits(m2s, layers.gradients):
            return None
        columns.append(gradients)
        for place, tensors in enumerate((layers.averages, parameters, *shaped)):
            column = self._columns.setdefault((number, place), _Column())
            found = None if tensors is None else column.find(tensors, m2s)
            if found is None and tensors is not None:
                return None
            columns.append(found)
        if steps:
            columns += [native.addresses(steps)] if native.are_plain(steps) else []
            if len(columns) < 8:
                return None
        layer_values = [x for c in layers.corrections or [1.0] * len(m2s) for x in (c, 0.0)]
        values = [*options.values, *_step_values(rule, group)]
        written = [*parameters, *layers.gradients, *(layers.averages or ())]
        return Call(rule, columns, checked[2], values, layer_values, written, steps)

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
