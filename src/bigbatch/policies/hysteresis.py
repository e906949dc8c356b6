"""Holds a change of the batch size that the policy would not make in nearby cases."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from bigbatch.errors import SettingError
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.setting_types import MAX_FACTOR, Coverage, In
from bigbatch.statistics.noise_scale import GradientStatistics

Decide = Callable[[GradientStatistics, TrainingState], Decision]

DeadBand = Annotated[float, In(f"[0, {MAX_FACTOR:g}]")]

_MAX_X = 30.0  # of x = ln(1 + N signal / noise): beyond it signal or noise is negligible


@dataclass(frozen=True)
class Hysteresis:
    """Decides whether a change of the batch size is held back.

    A policy that decides the same whatever the noise is, a schedule for example, is never held.
    """

    dead_band: DeadBand = 0.0  # share by which a larger (smaller) batch must grow (shrink) too
    confidence: Coverage | None = None  # of an interval at whose ends a change goes the same way

    def hold_reason(
        self, decide: Decide, decision: Decision, statistics: GradientStatistics, now: TrainingState
    ) -> str | None:
        """Why a decision is held back; None if it is followed."""
        direction = _direction(decision, now)
        if (
            not direction
            or not (self.dead_band or self.confidence)
            or not _depends_on_noise(decide, statistics, now)
        ):
            return None
        if self.dead_band:
            shifted_statistics, shifted_now = self._shifted(direction, statistics, now)
            shifted = decide(shifted_statistics, shifted_now)
            if _direction(shifted, shifted_now) != direction:
                return f"inside the dead band of {self.dead_band:g}"
        interval = statistics.interval if self.confidence else None
        ends = (interval.low, interval.high) if interval else ()
        if any(_direction(decide(_with_x(x, statistics), now), now) != direction for x in ends):
            return f"not sure at {self.confidence:g}"
        return None

    def require_interval(
        self, decide: Decide, statistics: GradientStatistics, now: TrainingState
    ) -> None:
        """Raises SettingError if `confidence` needs an interval that was not measured."""
        coverage = statistics.interval.level if statistics.interval else None
        if self.confidence in (None, coverage) or not math.isfinite(
            statistics.grad_sqnorm + statistics.grad_variance
        ):
            return
        if _depends_on_noise(decide, statistics, now):
            available = "there is none" if coverage is None else f"the meter's is of {coverage:g}"
            raise SettingError(
                f"confidence={self.confidence:g} needs an interval of that coverage, {available}; "
                f"measure with GradientMeter(confidence={self.confidence:g}), or set smoothing="
            )

    def _shifted(
        self, direction: int, statistics: GradientStatistics, now: TrainingState
    ) -> tuple[GradientStatistics, TrainingState]:
        """The same noise, measured with a batch that the dead band has moved in the direction.

        It stays a sample short of the bounds, so that the policy can still move.
        """
        factor = (1 + self.dead_band) ** direction
        to_whole = math.floor if direction > 0 else math.ceil
        target = to_whole(now.target_batch_size * factor)
        if direction < 0:
            target = max(target, now.min_batch + 1)
        elif now.max_batch is not None:
            target = min(target, now.max_batch - 1)
        batch_size = max(1, to_whole(now.batch_size * factor))
        return (
            replace(statistics, samples=statistics.samples * factor),
            replace(now, target_batch_size=target, batch_size=batch_size),
        )


def _depends_on_noise(decide: Decide, statistics: GradientStatistics, now: TrainingState) -> bool:
    """Whether the policy would decide differently if there were only noise, or none."""
    cases = statistics, _with_x(-math.inf, statistics), _with_x(math.inf, statistics)
    return len({decide(case, now).batch_size for case in cases}) > 1


def _direction(decision: Decision, now: TrainingState) -> int:
    """Whether a decision grows (+1), shrinks (-1) or keeps (0) the batch."""
    change = decision.batch_size - now.target_batch_size
    return (change > 0) - (change < 0)


def _with_x(x: float, statistics: GradientStatistics) -> GradientStatistics:
    """The same noise, with the signal at which ln(1 + N signal / noise) = x."""
    noise = statistics.grad_variance or 1.0
    x = min(max(x, -_MAX_X), _MAX_X)
    return replace(
        statistics, grad_sqnorm=noise * math.expm1(x) / statistics.samples, grad_variance=noise
    )
