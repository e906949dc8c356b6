"""Confidence intervals for similarity and noise scale, of one step and of a window.

They are computed for x = ln(1 + N signal / noise), whose variance hardly depends on its value;
phi = tanh(x / 2) and B_simple = N / (e^x - 1) are monotonic in x.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

MIN_RATIO = 0.05  # of 1 + N signal / noise; x of smaller ratios is noise
MAX_RATIO = 1e12
_MIN_NOISE = 1e-150  # the square of a smaller noise underflows
_DIFFERENCE_FREEDOM = 2 / 3  # degrees of freedom of a squared difference of successive values


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
        return _noise_scale(self.high, samples), _noise_scale(self.low, samples)


def _noise_scale(x: float, samples: float) -> float:
    if x <= 0:
        return math.inf
    return samples / math.expm1(x) if x < 700 else 0.0


def log_ratio(signal: float, noise: float, samples: float) -> float:
    """x = ln(1 + N signal / noise), with the ratio clamped to [0.05, 1e12]."""
    ratio = 1 + samples * signal / noise if noise > 0 else MAX_RATIO
    return math.log(min(max(ratio, MIN_RATIO), MAX_RATIO))


@lru_cache(maxsize=1024)
def student_t(level: float, freedom: float) -> float:
    """The t with P(|T| < t) = level, for `freedom` degrees of freedom, by quadrature.

    With T = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).

    Example:
        >>> round(student_t(0.9, 2), 3), round(student_t(0.95, 10), 3)
        (2.92, 2.228)
    """
    freedom = min(freedom, 1e4)
    max_angle = min(math.pi / 2, 20 / math.sqrt(freedom))  # the density beyond it is 0
    angle = np.linspace(0.0, max_angle, 40_001)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(level, below / below[-1], angle))


def jackknife(x: float, sums: tuple[float, float], count: int, level: float) -> Interval:
    """x -+ t se with se^2 = (k - 1) / k sum (x_d - mean)^2 / f and t of k - 1 degrees of freedom.

    f is `jackknife_excess`.
    """
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
    micro-batches with gaussian gradients whose noise is as strong along the signal as it is along
    itself (mu . Sigma mu = |mu|^2 tr Sigma^2 / tr Sigma); the dimension cancels. Without signal
    only pairs are left, whatever the gradients are.

    Source:
        Hoeffding 1948, Efron and Stein 1981; docs/theory.md (9).
    Example:
        >>> jackknife_excess(0.0, 3), round(jackknife_excess(5.0, 1000), 2)
        (4.0, 1.0)
    """
    share = min(math.exp(-x), 1.0)
    pairs = (count - 1) / count * (share + 1 / (count - 1)) ** 2
    single = (1 - share) ** 2 / count + 2 * share * (1 - share)
    return (2 * (count - 1) / (count - 2) * pairs + single) / (pairs + single)


class Scatter:
    """Covariance of a weighted average of (signal, noise), from successive steps' differences.

        C = sum w_t^2 (z_t - z_{t-1}) (z_t - z_{t-1})^T / 2,   z = (signal, noise)

    Each term estimates the variance of its own step and the one before it, so a slow drift does
    not count as noise; where batch sizes alternate widely, the interval is too wide.

    Source:
        von Neumann et al. 1941 (mean square successive difference); docs/theory.md (9).
    """

    def __init__(self) -> None:
        self._previous: tuple[float, float] | None = None  # (signal, noise) of the previous step
        # sums of w^2 / 2 times ds ds, ds dn, dn dn; of w^2 over all steps; of w^2 over steps after
        # the first; of w^4
        self._sums = [0.0] * 6

    def update(self, signal: float, noise: float, decay: float, weight: float) -> None:
        """Adds a step of this weight, after multiplying the weights of earlier steps by `decay`."""
        square = weight**2
        ds = dn = difference_square = 0.0
        if self._previous is not None:
            ds, dn = signal - self._previous[0], noise - self._previous[1]
            difference_square = square
        products = (square * product / 2 for product in (ds * ds, ds * dn, dn * dn))
        terms = [*products, square, difference_square, square**2]
        decays = [decay**2] * 5 + [decay**4]
        self._sums = [d * x + term for d, x, term in zip(decays, self._sums, terms, strict=True)]
        self._previous = signal, noise

    def interval(
        self, signal: float, noise: float, samples: float, weight: float, level: float
    ) -> Interval:
        """The interval for x of the averages, which were divided by `weight`, the sum of all w."""
        ss, sn, nn, squares, difference_squares, fourths = self._sums
        freedom = _DIFFERENCE_FREEDOM * squares**2 / fourths if fourths else 0.0
        x = log_ratio(signal, noise, samples)
        if noise == 0 < signal:
            return Interval(x, x, level, "window")
        if not difference_squares or freedom < 1 or noise < _MIN_NOISE:
            return Interval(-math.inf, math.inf, level, "window")
        total = noise + samples * max(signal, (MIN_RATIO - 1) * noise / samples)
        dx_ds, dx_dn = samples / total, -samples * signal / (noise * total)
        variance = dx_ds**2 * ss + 2 * dx_ds * dx_dn * sn + dx_dn**2 * nn
        variance *= squares / difference_squares / weight**2
        half_width = student_t(level, round(freedom, 1)) * math.sqrt(max(0.0, variance))
        return Interval(x - half_width, x + half_width, level, "window")

    @property
    def step_variances(self) -> tuple[float, float]:
        """Variances of one step's signal and noise; infinite before the second step."""
        ss, _, nn, _, difference_squares, _ = self._sums
        if not difference_squares:
            return math.inf, math.inf
        return ss / difference_squares, nn / difference_squares

    def variance_share(self, weight: float) -> float:
        """Variance of an average over that of one step, sum w^2 / (sum w)^2; nan without steps."""
        return self._sums[3] / weight**2 if weight else math.nan

    def state(self) -> list[float]:
        """The state that `load` takes."""
        return [*(self._previous or (math.nan, math.nan)), *self._sums]

    def load(self, state: list[float]) -> None:
        """Continues from a saved state."""
        signal, noise, *self._sums = state
        self._previous = None if math.isnan(signal) else (signal, noise)
