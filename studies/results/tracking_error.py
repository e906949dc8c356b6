"""Bias, scatter and lag of a series against its truth, and their intervals over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from bigbatch.statistics.confidence import student_t

SHIFTS = range(-8, 41)  # steps by which a series may be late
LEVEL = 0.95

Series = Sequence[float]


@dataclass(frozen=True)
class TrackingError:
    """How a series differs from its truth, in one run.

    Args:
        bias: mean of the differences.
        scatter: their standard deviation.
        lag: steps by which the series is late; nan if no shift inside `SHIFTS` is best.
        failures: steps without a finite value, left out of the three.
        steps: steps, with the failures.
    """

    bias: float
    scatter: float
    lag: float
    failures: int
    steps: int

    @property
    def rms(self) -> float:
        """Root of the mean square of the differences."""
        return math.hypot(self.bias, self.scatter)


def tracking_error(series: Series, truth: Series, first: int) -> TrackingError:
    """Compares two series from step `first` on.

        difference_t = x_t - y_t
        lag = the s for which x_t - y_(t-s) has the least variance

    The lag has a free offset, so a bias does not count as one, and unit gain: a series that only
    correlates with its truth, at half its size, does not follow it. Where both are straight lines
    every shift is as good, and the lag is nan.

    Args:
        series: x, one value a step.
        truth: y.
        first: the first step that counts, at least the largest shift.
    """
    x, y = np.asarray(series, float), np.asarray(truth, float)
    differences = (x - y)[first:]
    known = differences[np.isfinite(differences)]
    return TrackingError(
        bias=float(known.mean()) if len(known) else math.nan,
        scatter=float(known.std(ddof=1)) if len(known) > 1 else math.nan,
        lag=_lag(x, y, first),
        failures=len(differences) - len(known),
        steps=len(differences),
    )


def _lag(x: np.ndarray, y: np.ndarray, first: int) -> float:
    steps = np.arange(max(first, SHIFTS[-1]), len(x) + SHIFTS[0])  # those that every shift has
    if len(steps) < len(SHIFTS):
        return math.nan
    differences = np.array([x[steps] - y[steps - shift] for shift in SHIFTS])
    differences = differences[:, np.isfinite(differences).all(0)]
    if differences.shape[1] < len(SHIFTS):
        return math.nan
    variances = differences.var(1)
    if np.ptp(variances) <= 1e-12 * (1 + variances.max()):
        return math.nan
    best = int(variances.argmin())
    return float(SHIFTS[best]) if 0 < best < len(SHIFTS) - 1 else math.nan


@dataclass(frozen=True)
class OverSeeds:
    """Mean of one number per seed, with its 95 % t-interval.

    Args:
        mean, low, high: nan without a seed; infinite ends with one.
        seeds: seeds that have a number.
    """

    mean: float
    low: float
    high: float
    seeds: int

    def text(self, digits: int = 2, *, signed: bool = False) -> str:
        """mean (low to high)."""
        if not self.seeds:
            return "none"
        sign = "+" if signed else ""
        numbers = (f"{number:{sign}.{digits}f}" for number in (self.mean, self.low, self.high))
        return "{} ({} to {})".format(*numbers)


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """The interval of the mean over seeds; None and nan are left out."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return OverSeeds(math.nan, math.nan, math.nan, 0)
    half_width = math.inf
    if len(known) > 1:
        half_width = student_t(LEVEL, len(known) - 1) * stdev(known) / math.sqrt(len(known))
    mean = fmean(known)
    return OverSeeds(mean, mean - half_width, mean + half_width, len(known))


def verdict(checks: Sequence[tuple[OverSeeds, float, float]]) -> str:
    """Whether every interval lies inside its band.

    Args:
        checks: interval, lower and upper end of its band.
    Returns:
        "tracks" if all lie inside, "does not" if one lies outside, else "undecided".
    """
    if any(one.seeds and (one.low > high or one.high < low) for one, low, high in checks):
        return "does not"
    inside = all(one.seeds and low <= one.low and one.high <= high for one, low, high in checks)
    return "tracks" if inside else "undecided"
