"""A policy that repeats the batch sizes of earlier runs, without measuring anything."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy

from bigbatch.errors import RunError
from bigbatch.log.history import History, history_of
from bigbatch.policies.batch_schedule import Schedule

_PARTS = 50  # equal parts of the samples, in each of which the batch is constant


class Replay(Schedule):
    """Repeats the mean trajectory of runs: the control that tells what measuring adds.

    An adaptive policy decides from its own gradients. With the mean batch sizes of other seeds,
    known in advance, a training takes as many steps with about the same sizes; what it loses
    against the adaptive one is what the measurements of its own steps were worth.

        B(samples) = width / mean over runs of the steps in the part of the samples

    in 50 parts of equal width: the harmonic mean of the batch sizes, which gives the mean number of
    steps.

    Args:
        runs: directories of finished runs over the same number of samples.
    Raises:
        RunError: a run is unfinished or cannot be read, or their numbers of samples differ.
    """

    def __init__(self, *runs: Path | str) -> None:
        super().__init__(mean_schedule([_finished(Path(run)) for run in runs]))


def _finished(path: Path) -> History:
    history = history_of(path)
    if not history.finished:
        raise RunError(f"{path} is not finished, so it cannot be replayed; finish it first")
    return history


def mean_schedule(histories: Sequence[History]) -> str:
    """The mean trajectory of runs over the same samples, as the text of a `Schedule`.

    Raises:
        RunError: there is no run, or their numbers of samples differ.
    """
    if not histories:
        raise RunError("there is no run to replay; name one or more")
    totals = {history.rows[-1]["samples"] for history in histories}
    if len(totals) > 1:
        raise RunError(
            f"runs of {' and '.join(f'{total:,}' for total in sorted(totals))} samples have no "
            "mean trajectory; take runs over the same samples"
        )
    (total,) = totals
    parts = min(_PARTS, total)
    edges = [total * part // parts for part in range(parts + 1)]
    counts = [_steps_until(history, edges) for history in histories]
    sizes = [
        max(1, round((high - low) * len(counts) / sum(one[n + 1] - one[n] for one in counts)))
        for n, (low, high) in enumerate(pairwise(edges))
    ]
    clauses = [
        f"{size} from {low} samples"
        for low, before, size in zip(edges[1:], sizes, sizes[1:], strict=False)
        if size != before
    ]
    return ", ".join([str(sizes[0]), *clauses])


def _steps_until(history: History, edges: Sequence[int]) -> list[float]:
    """Steps until each number of samples, skipped ones too; a part of a step counts as a part."""
    ends = [0, *(row["samples"] for row in history.rows)]
    return [float(count) for count in numpy.interp(edges, ends, range(len(ends)))]
