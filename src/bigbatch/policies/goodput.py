"""The batch size that takes the least time for its progress, while the loss falls."""

import math
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Any

from bigbatch.policies.plan import clamp
from bigbatch.policies.policy import Bounded, Decision, Needs, TrainingState
from bigbatch.policies.step_time import StepTime
from bigbatch.setting_types import Count, Positive, checked
from bigbatch.statistics.noise_scale import GradientStatistics

_REACH = 2  # factor beyond the timed batch sizes up to which the fit is used
_MIN_TREND = 1.0  # standard errors by which the loss must have fallen
_MAX_PARTS = 64  # parts of the training that are kept
_WINDOW_SHARE = 0.3  # of the samples so far, in each of the two compared windows
_MIN_PARTS = 8  # of a window


@checked
@dataclass(frozen=True)
class Goodput(Bounded):
    """Sets the batch to the size that trains fastest, with nothing to choose.

        B = sqrt(B_0 B_simple),   B_0 = a / b

    A step of B samples takes a + b B seconds and makes 1 / (1 + B_simple / B) of the progress of a
    step without noise. There the time of a given progress, (a + b B)(1 + B_simple / B), is least.
    The training fits a and b to its own step times. Until they are known, the policy tries two
    batch sizes, the present one and twice that; the reason says so.

    Three limits hold it back. It goes at most a factor of 2 beyond the batch sizes that were timed.
    It grows only while the loss falls: the mean of the last 30 % of the samples must be lower than
    that of the 30 % before by a standard error. And the progress that it assumes needs a learning
    rate near its best.

    Args:
        overhead: B_0 in samples, for the same decisions in every run; None to fit it.
        min_batch: lower bound in samples; None for the first batch size, in a training.
        max_batch: upper bound in samples; None for none (in `AdaptiveBatch`: the data set).
    Raises:
        SettingError: an overhead that is not positive and finite, or crossed bounds.
    Source:
        The goodput of Pollux (Qiao et al., OSDI 2021), in closed form; docs/policies.md.
    Example:
        >>> step = GradientStatistics(1.0, 900.0, samples=128, micro_batches=4)
        >>> Goodput(overhead=400).decide(step, TrainingState(128, 128))
        Decision(batch_size=600, reason='sqrt(400 x noise scale 900)', lr_factor=1.0)
    """

    overhead: Positive | None = None
    min_batch: Count | None = None
    max_batch: Count | None = None

    @property
    def needs(self) -> Needs:
        """Averages, small changes, and the times and losses of steps."""
        return replace(super().needs, history=True)

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """Decides for the fastest size within the limits, or for a size that must be timed."""
        overhead, low, high = self.overhead, 0.0, math.inf
        if overhead is None:
            time = StepTime.fit(now.step_times)
            if time is None:
                return self._trial(now)
            overhead, low, high = time.overhead, time.smallest / _REACH, _REACH * time.largest
        scale = statistics.noise_scale
        reason = f"sqrt({overhead:.0f} x noise scale {scale:.0f})"
        best = math.sqrt(max(overhead, 1.0) * scale)  # a step takes some time in any case
        size = min(max(best, low), high)  # nan stays nan in this order
        if best < low or best > high:
            reason += f"; at most x{_REACH} beyond the timed sizes"
        trend = now.loss_trend
        if size > now.target_batch_size and trend is not None and trend < _MIN_TREND:
            size, reason = now.target_batch_size, f"{reason}; held: the loss falls no more"
        return self.bounded(size, reason, now)

    def _trial(self, now: TrainingState) -> Decision:
        """The next size to time, until two sizes are known."""
        timed = [round(size.batch_size) for size in now.step_times if size.counts]
        if not timed:
            return self._time(now.target_batch_size, "no size is known", now)
        first = timed[0]
        for size in (_REACH * first, first // _REACH):
            decision = self._time(size, f"that of {first} is known", now)
            if clamp(decision.batch_size, now.min_batch, now.max_batch) == size:
                return decision
        reason = f"{first} is known, and the bounds allow no other size"
        return self._time(now.target_batch_size, reason, now)

    def _time(self, size: int, reason: str, now: TrainingState) -> Decision:
        reason = f"the time of a step of {size} is needed, {reason}; or pass overhead="
        return replace(self.bounded(size, reason, now), trial=True)


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
            window = math.floor(remaining / (_WINDOW_SHARE * total) + 1e-9)
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
