"""The choice of a window the slow way: every weight written out, every pair of windows compared."""

import math

import numpy as np

WINDOWS = (4, 8, 16, 32, 64)


def weights(samples: np.ndarray, window: float) -> np.ndarray:
    """What each step, of so many samples, weighs in the average over a window of steps."""
    return samples * np.exp(-np.arange(len(samples))[::-1] / window)


def mean(values: np.ndarray, samples: np.ndarray, window: float) -> float:
    """The average over a window of steps."""
    return float(np.average(values, weights=weights(samples, window)))


def share(samples: np.ndarray, window: float) -> float:
    """Variance of that average, in variances of one value: sum w^2 / (sum w)^2."""
    w = weights(samples, window)
    return float((w**2).sum() / w.sum() ** 2)


def step_variance(values: np.ndarray, samples: np.ndarray) -> float:
    """Half the mean square of successive differences, over 16 steps; infinite for one value."""
    if len(values) == 1:
        return math.inf
    squares = weights(samples, 16)[1:] ** 2
    return float(np.average(np.diff(values) ** 2 / 2, weights=squares))


def window_of(signals: list[float], noises: list[float], sizes: list[int]) -> int:
    """The window that is chosen after these steps."""
    signal, noise, samples = (np.asarray(v, dtype=np.float64) for v in (signals, noises, sizes))

    def agree(short: int, long: int) -> bool:
        factor = max(share(samples, short) - share(samples, long), share(samples, short) / 5)
        reach = [2 * math.sqrt(factor * step_variance(v, samples)) for v in (signal, noise)]
        far = [abs(mean(v, samples, long) - mean(v, samples, short)) for v in (signal, noise)]
        slack = 0.1 * mean(noise, samples, long)
        return far[0] <= reach[0] and (far[1] <= reach[1] or far[1] <= slack)

    chosen = WINDOWS[0]
    for long in WINDOWS[1:]:
        if not all(agree(short, long) for short in WINDOWS if short < long):
            break
        chosen = long
    return chosen
