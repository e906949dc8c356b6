"""Checks the batch sizes of a training against SimiGrad's rule, step by step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Row = tuple[int, int, float]  # batch size, samples so far, similarity


@dataclass(frozen=True)
class Rule:
    """SimiGrad's rule; its string is the user's code for it, by averages.

        similarity < target: B <- max(B + 1, 11 B // 10);   > target: B <- 9 B // 10

    Args:
        target: similarity to reach.
        lowest, highest: bounds of the batch size.
    """

    target: float
    lowest: int
    highest: int

    def __str__(self) -> str:
        return (
            f"bb.SimiGrad(target={self.target}, min_batch={self.lowest}, max_batch={self.highest})"
        )

    def controller(self, batch_size: int | str) -> str:
        """The user's code for the rule by single steps, as it is checked here.

        Args:
            batch_size: the first batch size, or code for it.
        """
        return f"bb.Controller({self}, {batch_size}, smoothing=None)"

    def next(self, batch: int, similarity: float) -> int:
        """The batch size after a step."""
        if not math.isfinite(similarity) or similarity == self.target:
            return batch
        grows = similarity < self.target
        next_batch = max(batch + 1, 11 * batch // 10) if grows else 9 * batch // 10
        return max(self.lowest, min(self.highest, next_batch))


def rows_of(logged: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row for each update that a Hugging Face Trainer has logged."""
    return [(row["batch_size"], row["samples"], row.get("similarity", math.nan)) for row in logged]


def assert_followed(
    rows: Sequence[Row], rule: Rule, *, samples: int, passes: int, grid: int, sizes: int
) -> None:
    """Asserts that a training used each sample once per pass, with batches by the rule.

    Args:
        rows: the row of each update.
        rule: the rule that decided.
        samples: samples of a pass.
        passes: number of passes over the data.
        grid: maximum distance of a batch from the rule's: micro-batches have one size.
        sizes: minimum number of different batch sizes.
    """
    assert passes * samples == rows[-1][1]
    deviations = _deviations(rows, rule, samples, grid)
    assert not deviations, deviations
    batch_sizes = {batch for batch, *_ in rows}
    assert len(batch_sizes) >= sizes, batch_sizes


def _deviations(rows: Sequence[Row], rule: Rule, samples: int, grid: int) -> list[str]:
    """Batches of a pass that differ from the rule's.

    The last two updates of a pass share the remaining samples and are not compared.
    """
    deviations = []
    for _, updates in groupby(rows, lambda row: (row[1] - row[0]) // samples):
        one_pass = list(updates)[:-2]
        targets = [row[0] for row in one_pass[:1]]
        for batch, so_far, similarity in one_pass:
            if abs(batch - targets[-1]) > grid:
                deviations.append(f"after {so_far} samples {batch}, by the rule {targets[-1]}")
            targets.append(rule.next(targets[-1], similarity))
    return deviations
