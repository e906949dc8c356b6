"""Whether the loss still falls, from the losses of the steps."""

import math
from statistics import fmean, variance
from typing import Any

_MAX_PARTS = 64  # parts of the training that are kept
_SHARE = 0.3  # of the samples so far, in each of the two compared windows
_MIN_PARTS = 8  # of a window


class LossTrend:
    """How far the mean loss of the last 30 % of all samples is below that of the 30 % before.

        trend = (earlier - later) / sqrt(v_earlier / n_earlier + v_later / n_later)

    in standard errors: the training is kept as up to 64 parts of about as many samples, n parts lie
    in a window, and v is the variance of their mean losses. A trend below 1 is no fall.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, float]] = []  # samples, and sum of their losses
        self._length = 1  # samples of a part
        self.trend: float | None = None  # None while there are too few parts

    def add(self, samples: int, loss: float) -> None:
        """Adds a step; one whose loss is not finite is left out."""
        if not math.isfinite(loss):
            return
        if self._parts and self._parts[-1][0] < self._length:
            before, total = self._parts.pop()
            self._parts.append((before + samples, total + samples * loss))
        else:
            self._parts.append((samples, samples * loss))
        if len(self._parts) > _MAX_PARTS:
            self._parts = _merged(self._parts)
            self._length = sum(count for count, _ in self._parts) // len(self._parts)
        if self._parts[-1][0] >= self._length:
            self.trend = self._compare()

    def _compare(self) -> float | None:
        total = sum(samples for samples, _ in self._parts)
        windows: tuple[list[float], list[float]] = [], []  # later, earlier
        remaining = 0
        for samples, loss_sum in reversed(self._parts):
            window = math.floor(remaining / (_SHARE * total) + 1e-9)
            if window < len(windows):
                windows[window].append(loss_sum / samples)
            remaining += samples
        if min(map(len, windows)) < _MIN_PARTS:
            return None
        later, earlier = map(fmean, windows)
        error = math.sqrt(sum(variance(window) / len(window) for window in windows))
        if error == 0:
            return math.copysign(math.inf, earlier - later) if earlier != later else 0.0
        return (earlier - later) / error

    def state(self) -> dict[str, Any]:
        """The state that `load` takes."""
        return {"parts": [*self._parts], "length": self._length, "trend": self.trend}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._parts, self._length = [*state["parts"]], state["length"]
        self.trend = state["trend"]


def _merged(parts: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each pair of neighbours as one; the last one of an odd number stays."""
    pairs = zip(parts[::2], parts[1::2], strict=False)
    merged = [(n + m, total + other) for (n, total), (m, other) in pairs]
    return merged + (parts[-1:] if len(parts) % 2 else [])
