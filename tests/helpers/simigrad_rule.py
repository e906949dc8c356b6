"""Whether the batch sizes of a training are those of SimiGrad's rule, computed step by step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Row = tuple[int, int, float]  # batch size, samples so far, similarity


@dataclass(frozen=True)
class Rule:
    """SimiGrad's rule; as a string what the user types for it.

        similarity < target: B <- max(B + 1, 11 B // 10);   > target: B <- 9 B // 10

    Args:
        target: similarity to hold.
        lowest, highest: bounds of the batch size.
    """

    target: float
    lowest: int
    highest: int

    def __str__(self) -> str:
        return (
            f"bb.SimiGrad(target={self.target}, min_batch={self.lowest}, max_batch={self.highest})"
        )

    def next(self, batch: int, similarity: float) -> int:
        """The batch size after a step."""
        if not math.isfinite(similarity) or similarity == self.target:
            return batch
        moved = max(batch + 1, 11 * batch // 10) if similarity < self.target else 9 * batch // 10
        return max(self.lowest, min(self.highest, moved))


def rows_of(logged: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Of each update that a Hugging Face Trainer has logged."""
    return [(row["batch_size"], row["samples"], row.get("similarity", math.nan)) for row in logged]


def assert_followed(
    rows: Sequence[Row], rule: Rule, *, samples: int, passes: int, grid: int, sizes: int
) -> None:
    """A training saw each sample once a pass, and its batches followed the rule.

    Args:
        rows: of each update.
        rule: that decided.
        samples: of a pass.
        passes: over the data.
        grid: how far a batch may be from what is wanted: micro-batches have one size.
        sizes: least number of different batches.
    """
    assert passes * samples == rows[-1][1]
    left = _left(rows, rule, samples, grid)
    assert not left, left
    found = {batch for batch, *_ in rows}
    assert len(found) >= sizes, found


def _left(rows: Sequence[Row], rule: Rule, samples: int, grid: int) -> list[str]:
    """Where the batches leave the rule within a pass.

    The last two updates of a pass have what is left and are not looked at.
    """
    left = []
    for _, updates in groupby(rows, lambda row: (row[1] - row[0]) // samples):
        one_pass = list(updates)[:-2]
        wanted = [row[0] for row in one_pass[:1]]
        for batch, so_far, similarity in one_pass:
            if abs(batch - wanted[-1]) > grid:
                left.append(f"after {so_far} samples {batch}, and {wanted[-1]} was wanted")
            wanted.append(rule.next(wanted[-1], similarity))
    return left
