"""The time of a step as a function of its batch size, from timed steps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_BINS = 4  # bins of batch sizes per factor of two
_KEPT = 16  # latest steps of a bin that count
_MAX_AGE = 300  # steps after which one no longer counts
_KINDS = 32  # latest steps of which most are measured, or most are not
_MIN_STEPS = 5  # of a bin that counts
_MIN_RATIO = 1.5  # of the largest to the smallest bin, from which both terms are known

_Key = tuple[int, bool, int]  # ranks, whether measured, number of the bin
_Step = tuple[int, int, float]  # number of the step, batch size, seconds


@dataclass(frozen=True)
class TimedSize:
    """Steps of nearly one batch size."""

    batch_size: float  # median of their batch sizes, in samples
    seconds: float  # median of their times
    steps: int  # how many of the latest steps these are

    @property
    def counts(self) -> bool:
        """Whether there are enough steps for a median."""
        return self.steps >= _MIN_STEPS


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of B samples: fixed + per_sample B.

    Example:
        >>> StepTime(fixed=0.02, per_sample=0.0001, smallest=64, largest=128).overhead
        200.0
    """

    fixed: float  # seconds of any step: launches, optimizer, all-reduce
    per_sample: float  # seconds of one sample more
    smallest: float
    largest: float  # the timed batch sizes

    @property
    def overhead(self) -> float:
        """B_0 = fixed / per_sample: the samples that take as long as the fixed part of a step."""
        return self.fixed / self.per_sample if self.per_sample > 0 else math.inf

    def seconds(self, batch_sizes: Sequence[int]) -> float:
        """Seconds of steps of these batch sizes."""
        return self.fixed * len(batch_sizes) + self.per_sample * sum(batch_sizes)

    @classmethod
    def fit(cls, sizes: Iterable[TimedSize]) -> "StepTime | None":
        """Fits both terms by least squares of relative errors, each at least 0.

        None unless sizes of 5 steps or more differ by a factor of at least 1.5.
        """
        timed = [size for size in sizes if size.counts]
        batch_sizes = [size.batch_size for size in timed]
        if not timed or max(batch_sizes) < _MIN_RATIO * min(batch_sizes):
            return None
        weights = [size.steps / size.seconds**2 for size in timed]
        seconds = [size.seconds for size in timed]
        fixed, per_sample = _non_negative_line(batch_sizes, seconds, weights)
        return cls(fixed, per_sample, min(batch_sizes), max(batch_sizes))


class StepTimes:
    """Times of steps by batch size, in bins of a quarter of a factor of two.

    A bin keeps its 16 latest steps, of which the median counts, so that a step with an evaluation,
    a checkpoint or a compilation in it changes nothing. Steps that are measured have bins of their
    own, which count while most of the last 32 steps are measured, and until two sizes of the others
    are known. Steps of another number of ranks never count, nor do those that are older than
    `max_age`: the machine or the network may have changed since.
    """

    def __init__(self, ranks: int = 1, max_age: int | None = _MAX_AGE) -> None:
        self._ranks, self._max_age = ranks, math.inf if max_age is None else max_age
        self._bins: dict[_Key, list[_Step]] = {}
        self._steps = 0  # with a known time
        self._kinds: list[bool] = []  # whether each of the last ones was measured

    def add(self, batch_size: int, seconds: float, *, measured: bool = False) -> None:
        """Adds a step; a time of 0 is unknown and left out."""
        if seconds <= 0:
            return
        self._steps += 1
        self._kinds = [*self._kinds, measured][-_KINDS:]
        key = self._ranks, measured, round(_BINS * math.log2(batch_size))
        steps = self._bins.setdefault(key, [])
        steps.append((self._steps, batch_size, seconds))
        del steps[:-_KEPT]

    @property
    def sizes(self) -> tuple[TimedSize, ...]:
        """The timed sizes, from the smallest."""
        measured = self._timed(measured=True)
        if sum(self._kinds) > len(self._kinds) / 2:
            return measured
        others = self._timed(measured=False)
        return measured if StepTime.fit(measured) and not StepTime.fit(others) else others

    def _timed(self, *, measured: bool) -> tuple[TimedSize, ...]:
        timed, oldest = [], self._steps - self._max_age
        for key in sorted(key for key in self._bins if key[:2] == (self._ranks, measured)):
            steps = [step[1:] for step in self._bins[key] if step[0] > oldest]
            if steps:
                sizes, seconds = zip(*steps, strict=True)
                timed.append(TimedSize(median(sizes), median(seconds), len(steps)))
        return tuple(timed)

    def state(self) -> dict[str, Any]:
        """The state that `load` takes."""
        bins = [(*key, [*steps]) for key, steps in self._bins.items()]
        return {"bins": bins, "steps": self._steps, "kinds": [*self._kinds]}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._bins = {
            (ranks, kind, number): [(step, size, seconds) for step, size, seconds in steps]
            for ranks, kind, number, steps in state["bins"]
        }
        self._steps, self._kinds = state["steps"], [*state["kinds"]]


def _non_negative_line(
    x: Sequence[float], y: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """(a, b), each at least 0, with the least sum of weights (y - a - b x)^2."""
    total = sum(weights)
    x_mean, y_mean = (sum(w * v for w, v in zip(weights, vs, strict=True)) / total for vs in (x, y))
    xy = sum(w * (u - x_mean) * (v - y_mean) for w, u, v in zip(weights, x, y, strict=True))
    xx = sum(w * (u - x_mean) ** 2 for w, u in zip(weights, x, strict=True))
    slope = xy / xx
    if slope <= 0:
        return y_mean, 0.0
    if (fixed := y_mean - slope * x_mean) >= 0:
        return fixed, slope
    xy = sum(w * u * v for w, u, v in zip(weights, x, y, strict=True))
    return 0.0, xy / sum(w * u * u for w, u in zip(weights, x, strict=True))
