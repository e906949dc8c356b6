"""Holds a change of the batch size that the policy would not make in a nearby case."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.setting_types import MAX_FACTOR, In
from bigbatch.statistics.noise_scale import GradientStatistics

Decide = Callable[[GradientStatistics, TrainingState], Decision]

DeadBand = Annotated[float, In(f"[0, {MAX_FACTOR:g}]")]

_MAX_X = 30.0  # of x = ln(1 + N signal / noise): beyond it signal or noise is negligible


def is_inside(
    dead_band: float,
    decide: Decide,
    decision: Decision,
    statistics: GradientStatistics,
    now: TrainingState,
) -> bool:
    """Whether a decision to grow (shrink) the batch is inside the dead band.

    It is if the policy would not go the same way from a batch that is larger (smaller) by the dead
    band, with the same noise. A policy that decides the same whatever the noise is, a schedule for
    example, never is.
    """
    direction = _direction(decision, now)
    if not direction or not dead_band or not _depends_on_noise(decide, statistics, now):
        return False
    shifted_statistics, shifted_now = _shifted(dead_band, direction, statistics, now)
    return _direction(decide(shifted_statistics, shifted_now), shifted_now) != direction


def _shifted(
    dead_band: float, direction: int, statistics: GradientStatistics, now: TrainingState
) -> tuple[GradientStatistics, TrainingState]:
    """The same noise, measured with a batch that the dead band has moved in the direction.

    It stays a sample short of the bounds, so that the policy can still move.
    """
    factor = (1 + dead_band) ** direction
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
    cases = statistics, _with_x(-_MAX_X, statistics), _with_x(_MAX_X, statistics)
    return len({decide(case, now).batch_size for case in cases}) > 1


def _direction(decision: Decision, now: TrainingState) -> int:
    """Whether a decision grows (+1), shrinks (-1) or keeps (0) the batch."""
    change = decision.batch_size - now.target_batch_size
    return (change > 0) - (change < 0)


def _with_x(x: float, statistics: GradientStatistics) -> GradientStatistics:
    """The same noise, with the signal at which ln(1 + N signal / noise) = x."""
    noise = statistics.grad_variance or 1.0
    signal = noise * math.expm1(x) / statistics.samples
    return replace(statistics, grad_sqnorm=signal, grad_variance=noise)
