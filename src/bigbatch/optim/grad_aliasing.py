"""Lets moments read sums from `.grad`, without a buffer, if nothing else writes to it."""

import warnings
from collections.abc import KeysView

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource, only_watched
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.statistics.second_moment import GradientMoments

_CHECK_INTERVAL = 16  # steps; on a GPU a check waits for the device


class GradAliasing:
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
        """Checks, before the gradients are scaled, that the sums are those of the backwards.

        Returns:
            Whether every parameter was reached.
        """
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
