"""Whether a training diverged, by its log."""

from collections.abc import Sequence
from statistics import median

from bigbatch.runs.run_directory import Row

_FEWEST = 3  # steps that are the end of a short training
_LEAST = 0.5  # a loss below it is no sign of divergence, wherever a training began
_UP, _PEAK, _MORE = 2.0, 3.0, 1.0  # times the first loss, and so much more


def divergence_of(rows: Sequence[Row]) -> str:
    """How a training diverged, in words; "" where it did not.

    The first loss is that of weights that no step has moved, the end the median of the last tenth
    of all steps. A training has diverged where

        half of the last tenth was skipped or has no finite loss, or
        end > 2 first + 1, or
        any loss > 3 first + 1, and end >= first: it blew up, and never came back

    A training that only learns nothing, or forgets a little of what it began with, has not: its
    loss stays near the first, or small.
    """
    if not rows:
        return ""
    last_rows = rows[-max(_FEWEST, len(rows) // 10) :]
    finite = [row["loss"] for row in last_rows if row["loss"] is not None and not row["skipped"]]
    if 2 * len(finite) <= len(last_rows):
        lost, steps = len(last_rows) - len(finite), len(last_rows)
        return f"{lost} of its last {steps} steps had no finite gradient"
    first, end = rows[0]["loss"], median(finite)
    if first is None:
        return ""
    peak = max(row["loss"] for row in rows if row["loss"] is not None)
    blew_up = peak > _PEAK * first + _MORE and end >= max(first, _LEAST)
    if first > 0 and (end > _UP * first + _MORE or blew_up):
        return f"its loss began at {first:.3g}, rose to {peak:.3g} and ended at {end:.3g}"
    return ""
