"""The batch size that takes the least time for its progress."""

import math
from dataclasses import dataclass, replace

from bigbatch.policies.plan import clamp
from bigbatch.policies.policy import Bounded, Decision, Needs, TrainingState
from bigbatch.policies.step_time import StepTime
from bigbatch.setting_types import Count, Positive, checked
from bigbatch.statistics.noise_scale import GradientStatistics

_REACH = 2  # factor beyond the timed batch sizes up to which the fit is used
_MIN_TREND = 1.0  # standard errors by which the loss must have fallen


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
        min_batch: lower bound in samples.
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
    min_batch: Count = 1
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
