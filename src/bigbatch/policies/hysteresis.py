"""Whether to believe a policy: it is asked what it would do in other cases."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from bigbatch.errors import SettingError
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.setting_types import MAX_FACTOR, Coverage, In, checked
from bigbatch.statistics.noise_scale import GradientStatistics

Ask = Callable[[GradientStatistics, TrainingState], Decision]

DeadBand = Annotated[float, In(f"[0, {MAX_FACTOR:g}]")]

_FARTHEST = 30.0  # of x = ln(1 + N signal / noise): beyond it one of the two is alone


@checked
@dataclass(frozen=True)
class Hysteresis:
    """What keeps a decision from being followed.

    A policy that gives one answer whatever the noise, a schedule say, is never doubted.

    Args:
        dead_band: d holds a growth (shrinkage) that the policy would not want were the present
            batch 1 + d times as large (small).
        confidence: coverage of an interval for x = ln(1 + N |mu|^2 / tr), at both of whose ends the
            policy must want to move the same way.
    Raises:
        SettingError: a value outside its range.
    """

    dead_band: DeadBand = 0.0
    confidence: Coverage | None = None

    def doubt(
        self,
        ask: Ask,
        batch_size: int,
        statistics: GradientStatistics,
        now: TrainingState,
        bounds: tuple[int, int | None],
    ) -> str | None:
        """Why a decision for `batch_size` should not be followed; None where it should."""
        way = _sign(batch_size - now.target_batch_size)
        if (
            not way
            or not (self.dead_band or self.confidence)
            or not _minds_noise(ask, statistics, now)
        ):
            return None
        if self.dead_band and _way(ask, *self._moved(way, statistics, now, bounds)) != way:
            return f"inside the dead band of {self.dead_band:g}"
        known = statistics.interval if self.confidence else None
        ends = (known.low, known.high) if known else ()
        if any(_way(ask, _noise_at(x, statistics), now) != way for x in ends):
            return f"not sure at {self.confidence:g}"
        return None

    def require_interval(
        self, ask: Ask, statistics: GradientStatistics, now: TrainingState
    ) -> None:
        """Raises SettingError where no interval of the coverage asked for was measured."""
        level = statistics.interval.level if statistics.interval else None
        if self.confidence in (None, level) or not math.isfinite(
            statistics.grad_sqnorm + statistics.grad_variance
        ):
            return
        if _minds_noise(ask, statistics, now):
            available = "there is none" if level is None else f"the meter's is of {level:g}"
            raise SettingError(
                f"confidence={self.confidence:g} needs an interval of that coverage, {available}; "
                f"measure with GradientMeter(confidence={self.confidence:g}), or set smoothing="
            )

    def _moved(
        self,
        way: int,
        statistics: GradientStatistics,
        now: TrainingState,
        bounds: tuple[int, int | None],
    ) -> tuple[GradientStatistics, TrainingState]:
        """The same noise seen with a batch larger (way +1) or smaller by the dead band.

        Short of the bounds by a sample, so that the policy can still move.
        """
        factor, whole = (1 + self.dead_band) ** way, math.floor if way > 0 else math.ceil
        target, (low, high) = whole(now.target_batch_size * factor), bounds
        if way < 0:
            target = max(target, low + 1)
        elif high is not None:
            target = min(target, high - 1)
        batch_size = max(1, whole(now.batch_size * factor))
        return (
            replace(statistics, samples=statistics.samples * factor),
            replace(now, target_batch_size=target, batch_size=batch_size),
        )


def _minds_noise(ask: Ask, statistics: GradientStatistics, now: TrainingState) -> bool:
    """Whether the policy would decide otherwise with nothing but noise, or without any."""
    cases = statistics, _noise_at(-math.inf, statistics), _noise_at(math.inf, statistics)
    return len({ask(case, now).batch_size for case in cases}) > 1


def _way(ask: Ask, statistics: GradientStatistics, now: TrainingState) -> int:
    """+1, -1 or 0: what the policy would do with the batch."""
    return _sign(ask(statistics, now).batch_size - now.target_batch_size)


def _noise_at(x: float, statistics: GradientStatistics) -> GradientStatistics:
    """As much noise, with the signal that makes ln(1 + N signal / noise) this x."""
    unit = statistics.grad_variance or 1.0
    x = min(max(x, -_FARTHEST), _FARTHEST)
    return replace(
        statistics, grad_sqnorm=unit * math.expm1(x) / statistics.samples, grad_variance=unit
    )


def _sign(difference: int) -> int:
    return (difference > 0) - (difference < 0)
