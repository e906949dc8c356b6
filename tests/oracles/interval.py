"""Intervals the slow way: each micro-batch really left out, each weight really multiplied out."""

import math

import numpy as np
import pytest
from torch import Tensor

from oracles import noise as oracle


def log_ratio(signal: float, noise: float, samples: float) -> float:
    """x = ln(1 + N signal / noise), kept between ln 0.05 and ln 1e12."""
    if noise == 0:
        return math.log(1e12)
    return math.log(min(max(1 + samples * signal / noise, 0.05), 1e12))


def left_out(gradients: Tensor, sizes: list[float]) -> list[float]:
    """x of the micro-batches that remain where one is missing, for the N of the whole step."""
    result = []
    for missing in range(len(sizes)):
        rest = [d for d in range(len(sizes)) if d != missing]
        step = oracle.weighted(gradients[rest], [sizes[d] for d in rest])
        result.append(log_ratio(step.grad_sqnorm, step.grad_variance, sum(sizes)))
    return result


def excess(ratio: float, k: int) -> float:
    """f for N signal / noise = `ratio`, from variances in units of 2 tr Sigma^2 / (tr Sigma)^2.

    Those of ln |G|^2, which is of mean G, and of ln noise, which is independent of it; then that
    of all pairs g_i . g_j in both. What is left is of single micro-batches.
    """
    whole = (1 + 2 * ratio) / (1 + ratio) ** 2 + 1 / (k - 1)
    pairs = k * (k - 1) * (1 / k / (1 + ratio) + 1 / k / (k - 1)) ** 2
    return (whole - pairs + 2 * (k - 1) / (k - 2) * pairs) / whole


def jackknife(x: float, left: list[float], level: float) -> tuple[float, float]:
    """Tukey's: x -+ t sqrt((k - 1) / k sum (x_d - mean)^2 / f), t of k - 1 degrees of freedom."""
    k, average = len(left), sum(left) / len(left)
    scatter = (k - 1) / k * sum((one - average) ** 2 for one in left)
    error = math.sqrt(scatter / excess(max(math.expm1(x), 0.0), k))
    reach = _quantile(level, k - 1) * error
    return x - reach, x + reach


def _quantile(level: float, freedom: float) -> float:
    """Half the width of the interval of Student's t that has this probability."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    return stats.t.ppf((1 + level) / 2, freedom)


def weights(samples: list[float], window: float) -> list[float]:
    """What each step weighs in the average after the last: w_t = (1 - keep_t) prod later keeps."""
    return [
        (1 - math.exp(-n / window)) * math.exp(-sum(samples[t + 1 :]) / window)
        for t, n in enumerate(samples)
    ]


def of_window(
    steps: list[tuple[float, float, float]], window: float, level: float
) -> tuple[float, float]:
    """Interval for x of the averages of (signal, noise, samples) steps, in two passes.

    The covariance of a weighted mean is sum w_t^2 V_t / (sum w_t)^2; half the squared difference
    of successive steps estimates V_t. The first step has none: it counts as the others' mean.
    """
    z = np.array([[signal, noise] for signal, noise, _ in steps])
    w = np.array(weights([n for _, _, n in steps], window))
    covariance = np.zeros((2, 2))
    for t in range(1, len(steps)):
        difference = z[t] - z[t - 1]
        covariance += w[t] ** 2 * np.outer(difference, difference) / 2
    covariance *= (w**2).sum() / (w[1:] ** 2).sum() / w.sum() ** 2
    signal, noise = w @ z / w.sum()
    last = steps[-1][2]
    slope = np.array([1.0, -signal / noise]) * last / (noise + last * signal)
    freedom = 2 / 3 * (w**2).sum() ** 2 / (w**4).sum()
    reach = _quantile(level, freedom) * math.sqrt(slope @ covariance @ slope)
    x = log_ratio(signal, noise, last)
    return x - reach, x + reach
