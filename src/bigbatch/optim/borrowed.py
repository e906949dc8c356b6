"""Which sums of gradients need no buffer: `.grad` holds them, and nobody else writes there."""

import warnings
from collections.abc import Collection

import torch
from torch import Tensor

from bigbatch.measure.devices import FULL
from bigbatch.measure.moments import GradientMoments
from bigbatch.measure.source import GradientSource, only_watched

_COMPARED_EVERY = 16  # steps; on a GPU it waits


class BorrowedSums:
    """Lets moments read S where their source has it, once it was seen to be S there.

    It is not where `.grad` is written to between backward() and step(), or a hook changes
    gradients after ours. Autograd counts what is written, but not through `.data`. So everything
    is compared in a first step, and then one parameter after the other, one in 16 steps.
    """

    def __init__(self, moments: GradientMoments) -> None:
        self._moments = moments
        self._borrows = False  # in the present step
        self._intact = False
        self._steps = 0

    def stop(self) -> None:
        """The next step keeps sums of its own."""
        self._borrows = False
        self._moments.sum_of = None

    def check(self, source: GradientSource, parameters: Collection[Tensor]) -> None:
        """Whether the step's sums are what the backwards left; before anything is done to them."""
        reached = [p for p in parameters if self._moments.reached(p)]
        self._intact = source.sums_intact and all(self._is_intact(source, p) for p in reached)
        if self._borrows and not self._intact:
            warnings.warn(
                "gradients were changed between backward() and step() or by a hook, as they were "
                "not when they were last looked at; r of this step, and of earlier ones where "
                "that was done through .data, is that of the changed gradients",
                stacklevel=6,
            )

    def renew(self, source: GradientSource, parameters: Collection[Tensor]) -> None:
        """Chooses for the next step, when the sums of this one are no longer needed."""
        self._steps += 1
        able = [p for p in parameters if only_watched(p) and p.dtype in FULL]
        self._borrows = self._intact and bool(able)
        self._moments.sum_of = source.sum_of if self._borrows else None
        turn, left = divmod(self._steps, _COMPARED_EVERY)
        compared = [able[turn % len(able)]] if able and not left else []
        self._moments.keeps = {*parameters} - {*able} | {*compared}

    def _is_intact(self, source: GradientSource, parameter: Tensor) -> bool:
        """Whether S is where it would be read; asked of those that could borrow."""
        if not only_watched(parameter):
            return self._moments.keeps_sum(parameter)
        if parameter.dtype not in FULL or not self._moments.keeps_sum(parameter):
            return True
        total, _ = self._moments.of(parameter)
        return torch.equal(total, source.sum_of(parameter))
