"""The critical batch size, from loss curves of the same samples at several batch sizes.

K branches (batch sizes), R repeats, T points of a curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bigbatch.statistics.confidence import student_t

_BEYOND = 100.0  # how far beyond the tested sizes an estimate may lie before it counts as none
_ROUNDING = 1e-9
_POINTS = 4000  # of the search over 1 / B_crit; neighbors differ by less than half a percent


@dataclass(frozen=True)
class BranchCurve:
    """What a branch gained while it trained, in each repeat."""

    batch_size: int  # B
    samples: Sequence[int]  # trained when the loss was measured, increasing; (T,)
    gains: Sequence[Sequence[float]]  # the loss at the start less the loss then; (R, T)

    def gain_at(self, samples: np.ndarray) -> np.ndarray:
        """The gain after so many samples, in each repeat."""
        # the mean gain of a sample is a parabola of ln(samples) between three points: right to
        # 0.1 % with `curve_points`, where a branch loses up to 90 % of its loss
        points = np.asarray(self.samples, dtype=float)
        weights = _parabola_weights(np.log(points), np.log(samples))
        return np.asarray(samples * (np.asarray(self.gains, dtype=float) / points @ weights))


def curve_points(steps: int, least: int) -> list[int]:
    """The steps after which a branch is evaluated: all, 3/4, 1/2, 3/8 ... down to `least`.

    Example:
        >>> curve_points(64, 16)
        [16, 24, 32, 48, 64]
    """
    points, step = {least, steps}, float(steps)
    while step > least:
        points |= {max(least, round(share * step)) for share in (1.0, 0.75)}
        step /= 2
    return sorted(points)


def _parabola_weights(points: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Weights of the T points in the values at other places, (T, places); no extrapolation."""
    at = np.clip(at, points[0], points[-1])
    nodes = min(3, len(points))
    interval = np.searchsorted(points[1:-1], at, side="right")
    first = np.clip(interval - interval % 2, 0, len(points) - nodes)
    weights = np.zeros((len(points), len(at)))
    for node in range(nodes):
        weight = np.ones(len(at))
        for other in set(range(nodes)) - {node}:
            x = points[first + other]
            weight *= (at - x) / (points[first + node] - x)
        weights[first + node, np.arange(len(at))] = weight
    return weights


@dataclass(frozen=True)
class CriticalBatch:
    """An estimate of B_crit with its confidence interval."""

    estimate: float  # B_crit in samples; inf if no gain is lost to the batch size, nan if unknown
    low: float
    high: float  # the interval; 0 and inf where the curves give no bound
    reason: str = ""  # why it has no bound, or none on one side; empty if it has both


def critical_batch(curves: Sequence[BranchCurve], confidence: float) -> CriticalBatch:
    """B_crit of the model S(B) = S_min (1 + B / B_crit), S the samples to reach a loss.

    With D_B(s) the gain of branch B after s samples, and x = 1 / B_crit, all branches have gained
    the same where they are equally far:

        z_r(x) = sum_B w_B D_Br(s_B(x)) = 0 on average,    s_B(x) = S (1 + x B) / (1 + x B_max)
        w_B = ln B - mean ln B

    The estimate is the x at which the mean of z over the repeats is 0. The interval has all x that
    a t-test of z with R - 1 degrees of freedom does not reject (as Fieller 1954 for a ratio): its
    coverage is right for few repeats too if z is about normal, whatever the noise of the branches
    has in common. An end that would lie beyond the tested sizes counts only as far as they do.
    """
    curves = sorted(curves, key=lambda curve: curve.batch_size)
    sizes = np.array([curve.batch_size for curve in curves], dtype=float)
    ends = np.array([[gains[-1] for gains in curve.gains] for curve in curves])  # (K, R)
    quantile = student_t(confidence, ends.shape[1] - 1)
    for curve in curves:
        if not np.isfinite(curve.gains).all():
            size = curve.batch_size
            high = math.inf if size == sizes[0] else float(size)  # or else too large
            return CriticalBatch(math.nan, 0.0, high, f"the loss of batch {size} is not finite")
    if not _t(ends.mean(0)) > quantile:
        return CriticalBatch(math.nan, 0.0, math.inf, "the loss does not fall measurably")
    rising = sizes[_t(ends.T) < -quantile]
    if len(rising):
        reason = f"the loss rises at batch {rising[0]:.0f}, so it is too large"
        return CriticalBatch(math.nan, 0.0, float(rising[0]), reason)
    inverses = np.geomspace(1 / (_BEYOND * sizes[-1]), _BEYOND / sizes[0], _POINTS)
    inverses = np.array([0.0, *inverses, np.inf])
    z = _contrast(curves, sizes, inverses)  # (R, points)
    t = _t(z)
    return _interval(sizes, inverses, z.mean(0), np.abs(t) <= quantile, t[0] > 0)


def _contrast(curves: Sequence[BranchCurve], sizes: np.ndarray, inverses: np.ndarray) -> np.ndarray:
    samples = min(curve.samples[-1] for curve in curves)
    weights = np.log(sizes) - np.log(sizes).mean()
    total = np.zeros((len(curves[0].gains), len(inverses)))
    for size, weight, curve in zip(sizes, weights, curves, strict=True):
        shares = (1 + inverses[:-1] * size) / (1 + inverses[:-1] * sizes[-1])
        shares = np.append(shares, size / sizes[-1])
        total += weight * curve.gain_at(samples * shares)
    return total


def _interval(
    sizes: np.ndarray, inverses: np.ndarray, mean: np.ndarray, accepted: np.ndarray, rises: bool
) -> CriticalBatch:
    smallest, largest = float(sizes[0]), float(sizes[-1])
    crossings = np.flatnonzero((mean[:-1] < 0) & (mean[1:] >= 0))
    estimate = math.inf if rises else 0.0
    if len(crossings):
        at = crossings[0]
        (first, second), share = inverses[at : at + 2], mean[at] / (mean[at] - mean[at + 1])
        estimate = 1 / (first + share * (second - first)) if math.isfinite(second) else 0.0
        accepted[at : at + 2] = True  # without scatter nothing else is
    elif not accepted.any():
        if rises:
            reason = "larger batches gain more from the same samples"
            return CriticalBatch(math.inf, largest, math.inf, reason)
        return CriticalBatch(0.0, 0.0, smallest, "smaller batches gain more even in as many steps")
    with np.errstate(divide="ignore"):
        batches = 1 / inverses
    low, high = float(batches[accepted].min()), float(batches[accepted].max())
    low = low if low * _BEYOND > smallest * (1 + _ROUNDING) else 0.0
    high = high if high < largest * _BEYOND * (1 - _ROUNDING) else math.inf
    reasons = []
    if low == 0:
        reasons.append("the gains give no lower bound: more repeats or samples would")
    if math.isinf(high):
        reasons.append("the gains give no upper bound: larger batch sizes, or more samples, would")
    return CriticalBatch(
        float(estimate), min(low, largest), max(high, smallest), "; ".join(reasons)
    )


def _t(values: np.ndarray) -> np.ndarray:
    """The t statistic of the mean over the first dimension; infinite if only that is not 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = values.mean(0) / values.std(0, ddof=1) * math.sqrt(len(values))
    return np.where(np.isnan(t), 0.0, t)
