"""Whether the backwards of a step are micro-batches, which no position in the step tells apart."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.advisor.observations import Measurement

_LEVEL = 1e-5  # probability of a false alarm
_FEWEST = 8  # steps


def differs_by_position(measurements: Sequence[Measurement]) -> str:
    """Says if the backwards at some position of a step have other gradients than at others.

    Micro-batches are samples of one distribution, so they may be exchanged. Losses of several
    tasks, of an actor and a critic, or a penalty, may not. This is Friedman's test on the ranks
    within each step, of |h_d|^2 and of 8 random projections, at a level of 1e-5 together.

    Source:
        Friedman 1937.
    """
    steps = [one.features for one in measurements if len(one.features) > 1]
    k = len(steps[0]) if steps else 0
    steps = [step for step in steps if len(step) == k]
    if len(steps) < _FEWEST:
        return ""
    columns = torch.tensor(steps, dtype=torch.float64, device="cpu").unbind(2)
    for number, values in enumerate(columns):
        sums = _ranks(values).sum(0)
        if _probability(sums, len(steps)) * len(columns) <= _LEVEL:
            kind = "other gradients" if number else "longer gradients"
            return (
                f"backward {sums.argmax() + 1} of the {k} in a step has {kind} than backward "
                f"{sums.argmin() + 1} in nearly all of {len(steps)} steps, so they are not "
                "micro-batches of one loss and one distribution (several tasks or domains, an "
                "actor and a critic, a penalty?)"
            )
    return ""


def _probability(sums: Tensor, steps: int) -> float:
    """That of such sums of ranks or more different ones, if positions may be exchanged."""
    k = len(sums)
    chi_square = 12 * (sums - steps * (k + 1) / 2).square().sum() / (steps * k * (k + 1))
    freedom = chi_square.new_tensor(k - 1)
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2))


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1 in each row, ties shared."""
    row, others = values[:, :, None], values[:, None, :]
    return (others < row).sum(2) + ((others == row).sum(2) + 1) / 2
