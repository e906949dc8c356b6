"""Which sums of gradients need no buffer: `.grad` holds them, and nobody else writes there."""

import warnings
from collections.abc import KeysView

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource, only_watched
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.statistics.second_moment import GradientMoments

_COMPARED_EVERY = 16  # steps; on a GPU it waits


class GradAliasing:
    """Lets moments read S where their source has it, once it was seen to be S there.

    It is not where `.grad` is written to between backward() and step(), or a hook changes
    gradients after ours. Autograd counts what is written, but not through `.data`. So everything
    is compared in a first step, and then one parameter after the other, one in 16 steps.
    """

    def __init__(self, moments: GradientMoments) -> None:
        self._moments = moments
        self._aliases = False  # in the present step
        self._intact = False
        self._steps = 0
        self._able: list[Tensor] = []  # those whose `.grad` no hook changes after ours

    def stop(self) -> None:
        """The next step own_sum_parameters sums of its own."""
        self._aliases = False
        self._moments.sum_guard = None

    def check(self, source: GradientSource, parameters: KeysView[Tensor]) -> bool:
        """Whether the step's sums are what the backwards left; before anything is done to them.

        Returns:
            Whether every parameter was reached.
        """
        self._able, self._intact, all_reached = [], source.guard.sums_intact, True
        for p in parameters:  # one pass: of many small ones, looking is what costs
            able = p.dtype in FULL_PRECISION and only_watched(p)
            if able:
                self._able.append(p)
            reached, kept = self._moments.seen(p)
            all_reached = all_reached and reached
            if not (self._intact and reached):
                continue
            if kept is None:
                self._intact = able
            elif able:  # what is kept should be in `.grad` too
                self._intact = torch.equal(kept, source.guard.grad_sum(p))
        if self._aliases and not self._intact:
            warnings.warn(
                "gradients were changed between backward() and step() or by a hook, as they were "
                "not when they were last looked at; r of this step, and of earlier ones where "
                "that was done through .data, is that of the changed gradients",
                stacklevel=6,
            )
        return all_reached

    def renew(self, source: GradientSource, parameters: KeysView[Tensor]) -> None:
        """Chooses for the next step, when the sums of this one are no longer needed."""
        self._steps += 1
        self._aliases = self._intact and bool(self._able)
        self._moments.sum_guard = source.guard if self._aliases else None
        all_able = len(self._able) == len(parameters)  # hashing tensors takes its time
        self._moments.own_sum_parameters = set() if all_able else parameters - set(self._able)
        turn, left = divmod(self._steps, _COMPARED_EVERY)
        if self._able and not left:
            self._moments.own_sum_parameters.add(self._able[turn % len(self._able)])
