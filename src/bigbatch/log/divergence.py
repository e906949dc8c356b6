"""Detects from its log whether a training diverged."""

from collections.abc import Sequence
from statistics import median

from bigbatch.log.row_schema import Row

_MIN_LAST_STEPS = 3  # last steps of a short training
_HARMLESS_LOSS = 0.5  # a final loss below it is no sign of divergence
_END_FACTOR, _PEAK_FACTOR, _OFFSET = 2.0, 3.0, 1.0  # loss > factor * first loss + offset


def divergence_of(rows: Sequence[Row]) -> str:
    """How a training diverged, in words; "" where it did not.

    `first` is the loss of the initial weights, `end` the median loss of the last tenth of all
    steps. A training has diverged where

        half of the last tenth was skipped or has no finite loss, or
        end > 2 first + 1, or
        any loss > 3 first + 1, and end >= first: it blew up and did not recover

    A training that learns nothing, or forgets a little of its initial weights, has not diverged:
    its loss stays near the first, or small.
    """
    if not rows:
        return ""
    last_rows = rows[-max(_MIN_LAST_STEPS, len(rows) // 10) :]
    finite = [row["loss"] for row in last_rows if row["loss"] is not None and not row["skipped"]]
    if 2 * len(finite) <= len(last_rows):
        not_finite, steps = len(last_rows) - len(finite), len(last_rows)
        return f"{not_finite} of its last {steps} steps had no finite gradient"
    first, end = rows[0]["loss"], median(finite)
    if first is None:
        return ""
    peak = max(row["loss"] for row in rows if row["loss"] is not None)
    blew_up = peak > _PEAK_FACTOR * first + _OFFSET and end >= max(first, _HARMLESS_LOSS)
    if first > 0 and (end > _END_FACTOR * first + _OFFSET or blew_up):
        return f"its loss began at {first:.3g}, rose to {peak:.3g} and ended at {end:.3g}"
    return ""
