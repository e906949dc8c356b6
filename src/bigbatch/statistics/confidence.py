"""Confidence intervals for similarity and noise scale, of one step and of a window.

They are computed for x = ln(1 + N signal / noise), whose variance hardly depends on its value;
phi = tanh(x / 2) and B_simple = N / (e^x - 1) are monotonic in x.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

MIN_RATIO = 0.05  # of 1 + N signal / noise; x of smaller ratios is noise
MAX_RATIO = 1e12


@dataclass(frozen=True)
class Interval:
    """A two-sided interval for x = ln(1 + N signal / noise)."""

    low: float
    high: float  # the ends of the interval; infinite if nothing is known
    level: float  # nominal coverage
    covers: Literal["step", "window"]  # the true x of a step, or the average x of a window

    @property
    def similarity(self) -> tuple[float, float]:
        """(low, high) of phi = tanh(x / 2)."""
        return math.tanh(self.low / 2), math.tanh(self.high / 2)

    def noise_scale(self, samples: float) -> tuple[float, float]:
        """(low, high) of B_simple = N / (e^x - 1), in samples; +inf if x <= 0."""
        low, high = (
            math.inf if x <= 0 else samples / math.expm1(x) if x < 700 else 0.0
            for x in (self.high, self.low)
        )
        return low, high


def log_ratio(signal: float, noise: float, samples: float) -> float:
    """x = ln(1 + N signal / noise), with the ratio clamped to [0.05, 1e12]."""
    ratio = 1 + samples * signal / noise if noise > 0 else MAX_RATIO
    return math.log(min(max(ratio, MIN_RATIO), MAX_RATIO))


@lru_cache(maxsize=1024)
def student_t(level: float, freedom: float) -> float:
    """The t with P(|T| < t) = level, for `freedom` degrees of freedom, by quadrature.

    With T = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).
    """
    freedom = min(freedom, 1e4)
    max_angle = min(math.pi / 2, 20 / math.sqrt(freedom))  # the density beyond it is 0
    angle = np.linspace(0.0, max_angle, 40_001)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(level, below / below[-1], angle))


def jackknife(x: float, sums: Sequence[float], count: int, level: float) -> Interval:
    """x -+ t se with se^2 = (k - 1) / k sum (x_d - mean)^2 / f, f being `jackknife_excess`."""
    x_sum, square_sum = sums
    if count < 3 or not math.isfinite(square_sum):
        return Interval(-math.inf, math.inf, level, "step")
    squared_deviations = max(0.0, square_sum - x_sum**2 / count)
    variance = squared_deviations * (count - 1) / count / jackknife_excess(x, count)
    half_width = student_t(level, count - 1) * math.sqrt(variance)
    return Interval(x - half_width, x + half_width, level, "step")


def jackknife_excess(x: float, count: int) -> float:
    """f, the factor by which the delete-one jackknife overstates the variance of x.

        pairs = (k - 1) / k (a + 1 / (k - 1))^2,  single = (1 - a)^2 / k + 2 a (1 - a)
        f = (2 (k - 1) / (k - 2) pairs + single) / (pairs + single),  a = min(e^-x, 1)

    The variance of x = ln(N |G|^2 / noise) has a part of single micro-batches, which the jackknife
    estimates without bias, and a part of pairs, which it overstates. Their ratio is that of equal
    micro-batches with gaussian gradients and mu . Sigma mu = |mu|^2 tr Sigma^2 / tr Sigma.

    Source:
        Hoeffding 1948, Efron and Stein 1981; docs/theory.md (9).
    """
    share = min(math.exp(-x), 1.0)
    pairs = (count - 1) / count * (share + 1 / (count - 1)) ** 2
    single = (1 - share) ** 2 / count + 2 * share * (1 - share)
    return (2 * (count - 1) / (count - 2) * pairs + single) / (pairs + single)
