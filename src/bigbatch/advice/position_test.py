"""Whether the backwards of a step are micro-batches, which no position in the step tells apart."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from bigbatch.advice.observations import Measurement

_LEVEL = 1e-5  # probability of a false alarm
_FEWEST = 8  # steps


def differs_by_position(measurements: Sequence[Measurement]) -> str:
    """Says if the backwards at some position of a step have longer gradients than at others.

    Micro-batches are samples of one distribution, so their lengths may be exchanged. Losses of
    several tasks, of an actor and a critic, or a penalty, may not. This is Friedman's test on the
    ranks of |h_d|^2 within each step, at a level of 1e-5.

    Returns:
        A sentence; empty if nothing was found.
    Source:
        Friedman 1937; chi^2 by the approximation of Wilson and Hilferty 1931.
    """
    rows = [one.sqnorms for one in measurements if len(one.sqnorms) > 1]
    k = len(rows[0]) if rows else 0
    rows = [row for row in rows if len(row) == k]
    if len(rows) < _FEWEST:
        return ""
    sums = [0.0] * k
    for row in rows:
        for position, rank in enumerate(_ranks(row)):
            sums[position] += rank
    steps = len(rows)
    square_sum = math.fsum((total - steps * (k + 1) / 2) ** 2 for total in sums)
    chi_square = 12 * square_sum / (steps * k * (k + 1))
    if _survival(chi_square, k - 1) > _LEVEL:
        return ""
    longest, shortest = sums.index(max(sums)) + 1, sums.index(min(sums)) + 1
    return (
        f"backward {longest} of the {k} in a step has longer gradients than backward {shortest} in "
        f"nearly all of {steps} steps, so they are not micro-batches of one loss (several tasks, "
        "an actor and a critic, a penalty?)"
    )


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
