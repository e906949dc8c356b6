"""The choice of a window the slow way: every weight written out, every pair of windows compared."""

import math

import numpy as np

WINDOWS = (4, 8, 16, 32, 64)


def weights(steps: int, window: float) -> np.ndarray:
    """What each of so many steps weighs in the average over a window of steps."""
    return np.exp(-np.arange(steps)[::-1] / window)


def mean(values: np.ndarray, window: float) -> float:
    """The average over a window of steps."""
    return float(np.average(values, weights=weights(len(values), window)))


def share(steps: int, window: float) -> float:
    """Variance of that average, in variances of one value: sum w^2 / (sum w)^2."""
    w = weights(steps, window)
    return float((w**2).sum() / w.sum() ** 2)


def step_variance(values: np.ndarray) -> float:
    """Half the mean square of successive differences, over 16 steps; infinite for one value."""
    if len(values) == 1:
        return math.inf
    squares = weights(len(values), 16)[1:] ** 2
    return float(np.average(np.diff(values) ** 2 / 2, weights=squares))


def window_of(signals: list[float], noises: list[float]) -> int:
    """The window that is chosen after these steps."""
    steps = len(signals)
    signal, noise = np.asarray(signals, dtype=np.float64), np.asarray(noises, dtype=np.float64)

    def agree(short: int, long: int) -> bool:
        factor = max(share(steps, short) - share(steps, long), share(steps, short) / 5)
        reach = [2 * math.sqrt(factor * step_variance(values)) for values in (signal, noise)]
        far = [abs(mean(values, long) - mean(values, short)) for values in (signal, noise)]
        return far[0] <= reach[0] and (far[1] <= reach[1] or far[1] <= 0.1 * mean(noise, long))

    chosen = WINDOWS[0]
    for long in WINDOWS[1:]:
        if not all(agree(short, long) for short in WINDOWS if short < long):
            break
        chosen = long
    return chosen
