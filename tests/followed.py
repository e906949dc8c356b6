"""Whether the batch sizes of a training are those that SimiGrad's rule gives: its slow twin."""

import math
from collections.abc import Sequence
from itertools import groupby

Row = tuple[int, int, float]  # batch size, samples so far, similarity


def unfollowed(
    rows: Sequence[Row], *, samples: int, target: float, bounds: tuple[int, int], grid: int
) -> list[str]:
    """Where a training left the rule within a pass; nothing where it kept it.

        similarity < target: B <- max(B + 1, 11 B // 10);   > target: B <- 9 B // 10

    The last two updates of a pass have what is left and are not looked at.

    Args:
        rows: of each update.
        samples: of a pass.
        target: similarity to hold.
        bounds: least and largest batch size.
        grid: how far a batch may be from what is wanted: micro-batches have one size.
    """
    left = []
    for _, updates in groupby(rows, lambda row: (row[1] - row[0]) // samples):
        one_pass = list(updates)[:-2]
        wanted = [row[0] for row in one_pass[:1]]
        for batch, so_far, similarity in one_pass:
            if abs(batch - wanted[-1]) > grid:
                left.append(f"after {so_far} samples {batch}, and {wanted[-1]} was wanted")
            wanted.append(_next(wanted[-1], similarity, target, bounds))
    return left


def _next(batch: int, similarity: float, target: float, bounds: tuple[int, int]) -> int:
    if not math.isfinite(similarity) or similarity == target:
        return batch
    moved = max(batch + 1, 11 * batch // 10) if similarity < target else 9 * batch // 10
    return max(bounds[0], min(bounds[1], moved))
