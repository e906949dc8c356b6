"""The schedule of batch sizes that reaches a noisy quadratic's target first, and best rates."""

import math
from dataclasses import dataclass

import numpy as np

from studies.noisy_quadratic import BASE_BATCH, Array, Bed, Moment, Rule

_KNOTS = 6
_POPULATION, _GENERATIONS, _ELITE = 48, 25, 10
_FIRST_SPREAD, _LEAST_SPREAD = 0.8, 0.01  # of the natural logarithms
_PEAKS, _LENGTHS = (1e-5, 4.0, 40), (3e3, 3e8, 10)  # of a grid: from, to, points
_NEAR = 0.5  # spread of the search that follows, of the natural logarithms
_REFINEMENTS = 4


@dataclass(frozen=True)
class Outcome:
    """How long a training takes to its target, at the peak rate and length of a decay it has."""

    time: float  # samples + overhead steps; infinite if it never gets there
    samples: float
    steps: float
    peak: float = 1.0  # learning rate at the base batch
    length: float = 1.0  # samples of a decay


def with_best_rate(
    bed: Bed,
    rule: Rule,
    near: Outcome | None = None,
    *,
    limit: float = math.inf,
    max_change: float = math.inf,
    start: float = BASE_BATCH,
) -> Outcome:
    """The outcome of a rule at the peak rate, and length of the decay, that suit it best.

    Args:
        bed: the training.
        rule: its batch sizes.
        near: an outcome of the bed, near whose rate and length the search begins.
        limit: time after which a training is given up.
        max_change: largest factor between the batch sizes of two steps.
        start: the batch size before the first step, for that factor.
    """
    if bed.rate == "greedy":
        return _best(bed.run(rule, np.zeros((1, 2)), limit, max_change, start), np.zeros((1, 2)))
    axes = [np.log(np.geomspace(*limits)) for limits in (_PEAKS, _LENGTHS)]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes)], 1)
    if near is not None:
        grid = np.concatenate([grid, np.log([[near.peak, near.length]])])
    best = _best(bed.run(rule, grid, limit, max_change, start), grid)
    mean, spread = np.log([best.peak, best.length]), np.full(2, _NEAR)
    generator = np.random.default_rng(0)
    for _ in range(_REFINEMENTS):
        points = mean + spread * generator.standard_normal((_POPULATION, 2))
        points[0] = np.log([best.peak, best.length])
        results = bed.run(rule, points, limit, max_change, start)
        best = min(best, _best(results, points), key=lambda one: one.time)
        order = np.argsort(results[0])[:_ELITE]
        if np.isfinite(results[0, order]).sum() > 1:
            order = order[np.isfinite(results[0, order])]
            mean, spread = points[order].mean(0), points[order].std(0) + _LEAST_SPREAD
    return best


def optimal_schedule(bed: Bed, start: Array, outcome: Outcome, seed: int) -> Outcome:
    """The least time over schedules of 6 knots, by the cross-entropy method.

    ln B is piecewise linear in ln(loss). The peak rate and the length of a decay are optimized with
    it.

    Args:
        bed: the training.
        start: ln B at the knots, to begin with.
        outcome: has the rate to begin with.
        seed: of the search.
    Source:
        Rubinstein 1999 (cross-entropy method); Zhang et al. 2019 (arXiv 1907.04164).
    """
    generator = np.random.default_rng(seed)
    mean = np.concatenate([start, np.log([outcome.peak, outcome.length])])
    spread = np.concatenate([np.full(_KNOTS, _FIRST_SPREAD), np.full(2, _FIRST_SPREAD / 2)])
    best, best_outcome = mean, outcome
    for _ in range(_GENERATIONS):
        points = mean + spread * generator.standard_normal((_POPULATION, len(mean)))
        points[0], points[1] = mean, best
        rule, limit = knots_rule(bed, points[:, :_KNOTS]), 2 * best_outcome.time
        results = bed.run(rule, points[:, _KNOTS:], limit)
        order = np.argsort(results[0])[:_ELITE]
        found = _best(results, points[:, _KNOTS:])
        if found.time < best_outcome.time:
            best, best_outcome = points[order[0]], found
        mean = points[order].mean(0)
        spread = points[order].std(0) + _LEAST_SPREAD
    return best_outcome


def knots(bed: Bed) -> Array:
    """ln(loss) at the knots, from 0 to the target's."""
    return np.linspace(0.0, np.log(bed.target), _KNOTS)


def knots_rule(bed: Bed, values: Array) -> Rule:
    """A rule for each row of ln B at the knots."""
    width = np.log(bed.target) / (_KNOTS - 1)

    def rule(moment: Moment) -> Array:
        place = np.clip(moment.log_loss / width, 0, _KNOTS - 1 - 1e-9)
        low = place.astype(np.int64)
        part, rows = place - low, moment.rows
        return np.asarray(np.exp((1 - part) * values[rows, low] + part * values[rows, low + 1]))

    return rule


def _best(results: Array, log_rates: Array) -> Outcome:
    """The fastest of the trainings, each at its row of ln(peak, length)."""
    first = int(np.argmin(results[0]))
    time, samples, steps = map(float, results[:, first])
    peak, length = map(float, np.exp(log_rates[first]))
    return Outcome(time, samples, steps, peak, length)
