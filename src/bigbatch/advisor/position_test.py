"""Whether the backwards of a step are micro-batches, which no position in the step tells apart."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from bigbatch.advisor.observations import Measurement

_LEVEL = 1e-5  # probability of a false alarm
_FEWEST = 8  # steps


def differs_by_position(measurements: Sequence[Measurement]) -> str:
    """Says if the backwards at some position of a step have other gradients than at others.

    Micro-batches are samples of one distribution, so they may be exchanged. Losses of several
    tasks, of an actor and a critic, or a penalty, may not. This is Friedman's test on the ranks
    within each step, of |h_d|^2 and of 8 random projections, at a level of 1e-5 together.

    Source:
        Friedman 1937; chi^2 by the approximation of Wilson and Hilferty 1931.
    """
    steps = [one.features for one in measurements if len(one.features) > 1]
    k = len(steps[0]) if steps else 0
    steps = [step for step in steps if len(step) == k]
    if len(steps) < _FEWEST:
        return ""
    columns = range(len(steps[0][0]))
    for column in columns:
        ranks = [_ranks([features[column] for features in step]) for step in steps]
        sums = [math.fsum(position) for position in zip(*ranks, strict=True)]
        if _probability(sums, len(steps)) * len(columns) <= _LEVEL:
            first, second = sums.index(max(sums)) + 1, sums.index(min(sums)) + 1
            kind = "other gradients" if column else "longer gradients"
            return (
                f"backward {first} of the {k} in a step has {kind} than backward {second} in "
                f"nearly all of {len(steps)} steps, so they are not micro-batches of one loss and "
                "one distribution (several tasks or domains, an actor and a critic, a penalty?)"
            )
    return ""


def _probability(sums: Sequence[float], steps: int) -> float:
    """That of such sums of ranks or more different ones, if positions may be exchanged."""
    k = len(sums)
    square_sum = math.fsum((total - steps * (k + 1) / 2) ** 2 for total in sums)
    return _survival(12 * square_sum / (steps * k * (k + 1)), k - 1)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties shared."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def _survival(chi_square: float, freedom: int) -> float:
    """P(chi^2 > value)."""
    scale = 2 / (9 * freedom)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)
    return 1 - NormalDist().cdf(z)
