"""Scales gradients by GSNR in `step()`: those of one process, or its shards under fully_shard."""

import warnings
from collections.abc import KeysView
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource, Subscriber, only_watched
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.optim.apply_gsnr import AppliedGsnr, Layer, apply_gsnr, out_of_range
from bigbatch.optim.functional import ratio, share_out_of_range
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.sharding import all_reduce_of, local
from bigbatch.statistics.second_moment import GradientMoments

_CHECK_INTERVAL = 16  # steps; on a GPU a check waits for the device


class LocalStep:
    """Multiplies `.grad` by r, from the moments of the source's micro-batches."""

    def __init__(self, state: GsnrState) -> None:
        self._state = state
        self._aliasing = _GradAliasing(state.moments)

    def bind(self, source: GradientSource) -> list[Subscriber]:
        """The moments subscribe; in the next step they keep their own sums."""
        self._aliasing.stop()
        return [self._state.moments]

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Replaces g by r g, or by p_hat g with momentum.

        Raises:
            GradientError: fewer than two micro-batches, or a gradient that none of them computed.
        """
        moments, checks = self._state.moments, self._state.warnings
        if not source.micro_batches or moments.micro_batches < 2:
            source.require_no_step_in_backward()
            raise GradientError(
                f"{self._state.name} saw {source.micro_batches} backward() calls since "
                "zero_grad(), it needs at least 2 (k >= 8 is better): split the batch into "
                "micro-batches; under fully_shard a micro-batch counts where its gradient is "
                "reduced, so leave set_requires_gradient_sync on"
            )
        agree = checks.checks_agreement and self._all_agree()
        bad_layers = self._out_of_range() if checks.checks_range else []
        all_reached = self._aliasing.check(source, self._state.vr_parameters.keys())
        with torch.no_grad():
            layers = self._scale(all_reached=all_reached)
        self._aliasing.choose_sums(source, self._state.vr_parameters.keys())
        return AppliedGsnr(moments.micro_batches, layers, agree, bad_layers)

    def _all_agree(self) -> bool:
        """Whether there are gradients, and every element is the same in all micro-batches."""
        agree, moments = False, self._state.moments
        for parameter in filter(moments.is_reached, self._state.vr_parameters):
            total, m2 = moments.sum_and_m2(parameter)
            q = ratio(total, m2, moments.weight)
            if (q.isfinite() | ~total.isfinite()).any():
                return False
            agree = agree or bool(q.isinf().any())
        return agree

    def _out_of_range(self) -> list[Tensor]:
        moments = self._state.moments
        reached = filter(moments.is_reached, self._state.vr_parameters)
        return out_of_range(
            [(p, share_out_of_range(*moments.sum_and_m2(p), moments.weight)) for p in reached]
        )

    def _scale(self, *, all_reached: bool) -> dict[Tensor, Tensor]:
        moments, parts = self._state.moments, []
        for group in self._state.base.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and group["vr"]]
            parts.append((group, parameters, all_reduce_of(parameters)))
        for p in () if all_reached else chain.from_iterable(part[1] for part in parts):
            if not moments.is_reached(p) and local(p.grad).any():
                raise GradientError(
                    "a parameter has a gradient that no counted backward gave it; let every "
                    "gradient come from backward() after zero_grad()"
                )
        layers: dict[Tensor, Tensor] = {}  # no error is raised after this line
        for group, parameters, all_reduce in parts:
            options = self._state.options(group, moments.weight)
            rows = apply_gsnr(options, [self._layer(p, group) for p in parameters], all_reduce)
            if options.watch:
                if all_reduce is not None:
                    all_reduce(rows)
                layers.update(zip(parameters, rows, strict=True))
        return layers

    def _layer(self, parameter: Tensor, group: dict[str, Any]) -> Layer:
        gradient = local(parameter.grad)
        total, m2 = self._state.moments.sum_and_m2(parameter, gradient)
        if group["beta3"] is None:
            return Layer(total, m2, gradient)
        return Layer(total, m2, gradient, *self._state.momentum.next(parameter, group["beta3"]))


class _GradAliasing:
    """Lets moments read S from their source, after a step that found the same S there.

    S differs if `.grad` is written between backward() and step(), or if a hook changes gradients
    after ours. Autograd counts writes, but not those through `.data`. So the first step compares
    all sums, and then every 16th step compares the sum of one parameter, each in turn.
    """

    def __init__(self, moments: GradientMoments) -> None:
        self._moments = moments
        self._is_aliased = False  # in the present step
        self._intact = False  # whether the sums in `.grad` are S
        self._steps = 0
        self._eligible: list[Tensor] = []  # parameters whose `.grad` no hook changes after ours

    def stop(self) -> None:
        """Makes the moments keep their own sums in the next step."""
        self._is_aliased = False
        self._moments.sum_guard = None

    def check(self, source: GradientSource, parameters: KeysView[Tensor]) -> bool:
        """Checks, before the gradients are scaled, that the sums are those of the backwards."""
        self._eligible, self._intact, all_reached = [], source.guard.sums_intact, True
        for p in parameters:  # one pass, since the checks dominate over many small parameters
            is_eligible = p.dtype in FULL_PRECISION and only_watched(p)
            if is_eligible:
                self._eligible.append(p)
            reached, own_sum = self._moments.reached_and_own_sum(p)
            all_reached = all_reached and reached
            if not (self._intact and reached):
                continue
            if own_sum is None:
                self._intact = is_eligible
            elif is_eligible:  # `.grad` should have the same sum
                self._intact = torch.equal(own_sum, source.guard.grad_sum(p))
        if self._is_aliased and not self._intact:
            warnings.warn(
                "gradients were changed between backward() and step() or by a hook, which they "
                "were not at the last check; r of this step, and of earlier steps if they were "
                "changed through .data, is that of the changed gradients",
                stacklevel=6,
            )
        return all_reached

    def choose_sums(self, source: GradientSource, parameters: KeysView[Tensor]) -> None:
        """Chooses which sums the moments keep in the next step, after this step's last use of S."""
        self._steps += 1
        self._is_aliased = self._intact and bool(self._eligible)
        self._moments.sum_guard = source.guard if self._is_aliased else None
        all_eligible = len(self._eligible) == len(parameters)  # hashing tensors is slow
        self._moments.own_sum_parameters = (
            set() if all_eligible else parameters - set(self._eligible)
        )
        turn, remainder = divmod(self._steps, _CHECK_INTERVAL)
        if self._eligible and not remainder:
            self._moments.own_sum_parameters.add(self._eligible[turn % len(self._eligible)])
