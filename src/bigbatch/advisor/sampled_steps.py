"""Which steps are measured: one in n, so that measuring takes a share of the time."""

import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import mean, median

_SHARE = 0.04  # of the time that measuring may take; other steps pay up to 1 % more
_FREE_SECONDS = 6.0  # of measuring beyond that, spread evenly over the observed steps
_STEPS = 2000  # over which, if nothing limits them
_FIRST = 2  # measured steps that compile and fill caches
_TIMED = 8  # unmeasured steps that a median needs
_KEPT = 64


class SampledSteps:
    """Chooses the steps that are measured, the same ones on every rank.

        n = e / (share x seconds of other steps + 6 s / observed steps), rounded up

    e is the median of what a measured step takes beyond another one. The share is 4 %; the 6 s show
    the noise of short steps. A rank's own times are summed over the ranks together with the
    measurement, so all know the same when they choose.
    """

    def __init__(self, seconds: float, steps: int | None = None, *, pair: bool = False) -> None:
        self._limit, self._began = seconds, time.perf_counter()
        self._free = _FREE_SECONDS / (steps or _STEPS)
        self._span = 2 if pair else 1
        self._plain: deque[float] = deque(maxlen=_KEPT)  # seconds of steps that were not measured
        self._spans: deque[float] = deque(maxlen=self._span)  # seconds of the last measured steps
        # seconds of other steps, and what the last measured ones took beyond that on average
        self._cost = (0.0, 0.0)
        self._first = _FIRST  # measured steps that are still left out
        self._extras: deque[float] = deque(maxlen=_KEPT)  # e, of all ranks
        self.failed = 0  # measured steps in a row that failed on some rank
        # whether the last measured step failed on this rank, and whether samples influence others
        self._flags = (0.0, 0.0)
        self.is_coupled = False  # whether those of some rank do
        self.timed_out = False
        self._count = 0  # steps since the last choice
        self._interval = 2

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return self._count < self._span

    @property
    def seconds(self) -> float:
        """Median time of a step that was not measured; 0 if there was none."""
        return median(self._plain) if self._plain else 0.0

    @property
    def shared(self) -> tuple[float, ...]:
        """What this rank tells the others at a measured step.

        1, seconds of other steps, what the last one took beyond that, seconds so far, its failure,
        and whether samples influence each other.
        """
        elapsed = time.perf_counter() - self._began
        return 1.0, *self._cost, elapsed, *self._flags

    def end_step(
        self,
        seconds: float,
        shared: Sequence[float] | None,
        *,
        failed: bool,
        is_coupled: bool = False,
    ) -> None:
        """A step has ended.

        Args:
            seconds: its time; 0 if it is unknown.
            shared: the sums of `shared` over the ranks; None if it was not measured.
            failed: whether it was to be measured and could not be.
            is_coupled: whether its samples influence each other.
        """
        measured = self.due
        self._count += 1
        if not measured:
            if seconds:
                self._plain.append(seconds)
        else:
            self._flags = float(failed), float(is_coupled)
            if seconds and self._plain:
                self._spans.append(seconds)  # of a pair the second one may take longer
                self._cost = self.seconds, mean(self._spans) - self.seconds
            if shared is not None:
                self._learn(shared)
        if self._count >= self._interval * self._span:
            self._count = 0

    def _learn(self, shared: Sequence[float]) -> None:
        ranks, plain, extra, elapsed, failures, coupled = shared
        self.is_coupled = coupled > 0
        self.timed_out = elapsed / ranks > self._limit
        self.failed = self.failed + 1 if failures else 0
        if plain and self._first:
            self._first -= 1
        elif plain:
            self._extras.append(max(0.0, extra / ranks))
        if self._extras and len(self._plain) >= _TIMED:
            share = _SHARE * plain / ranks + self._free  # seconds of measuring a step
            self._interval = max(1, math.ceil(median(self._extras) / share))
