"""What a training takes from earlier runs: weights, a mean learning rate, or batch sizes."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from torch import nn

from bigbatch.errors import RunError
from bigbatch.log.history import History, history_of
from bigbatch.policies.batch_schedule import Schedule
from bigbatch_recipes.process_group import is_rank_zero, run_on_rank_zero
from bigbatch_recipes.run_directory import RunDirectory


def init_from(path: Path, model: nn.Module) -> None:
    """Loads the run's weights by name and shape; warns of missing ones. Collective.

    Raises:
        RunError: the run does not exist, is not finished, has no checkpoint, or none of its weights
            fit.
    """
    run_weights = run_on_rank_zero(lambda: _weights(path))
    state = model.state_dict()
    fitting = {
        name: weights
        for name, weights in run_weights.items()
        if name in state and state[name].shape == weights.shape
    }
    if not fitting:
        raise RunError(f"no weight of {path} fits this model; begin from a run of the same network")
    model.load_state_dict(fitting, strict=False)
    if is_rank_zero() and (missing := sorted(state.keys() - fitting.keys())):
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warnings.warn(
            f"{len(fitting)} of {len(state)} tensors begin as {path} left them; new are {names}",
            stacklevel=2,
        )


def _weights(path: Path) -> dict[str, Any]:
    run = RunDirectory.open(path)
    _finished(path, "nothing can begin from it")
    state = run.load_weights()
    if state is None:
        raise RunError(f"{path} has no checkpoint to begin from; train it first")
    return state


def mean_factor(path: Path, sizes: Mapping[str, int]) -> float:
    """The mean of r over the steps and weights of a run.

    The base optimizer at this multiple of lr has the mean rate of the weights that r scaled. The
    run's own steps are longer, as r is larger where the gradient is. Collective.
    """
    return run_on_rank_zero(lambda: _mean(path, sizes))


def _mean(path: Path, sizes: Mapping[str, int]) -> float:
    history = _finished(path, "its mean r is not known")
    rows = [row["gsnr"] for row in history.rows if row.get("gsnr")]
    factors = [(name, r) for row in rows for name, (r, *_) in row.items() if r is not None]
    if not factors:
        raise RunError(f"{path} has no factors r; take a run with a VR optimizer")
    if unknown := next((name for name, _ in factors if name not in sizes), None):
        raise RunError(
            f"{path} has a layer {unknown}, which this network lacks; take a run of the "
            "same network"
        )
    return fmean([r for _, r in factors], [sizes[name] for name, _ in factors])


_PARTS = 50  # equal parts of the samples, in each of which the batch is constant


def replay_of(*runs: Path) -> Schedule:
    """Repeats the mean trajectory of runs: the control that tells what measuring adds.

    An adaptive policy decides from its own gradients. With the mean batch sizes of other seeds,
    known in advance, a training takes as many steps with about the same sizes; what it loses
    against the adaptive one is what the measurements of its own steps were worth.

        B(samples) = width / mean over runs of the steps in the part of the samples

    in 50 parts of equal width: the harmonic mean of the batch sizes, which gives the mean number of
    steps.
    """
    return Schedule(mean_schedule([_finished(run, "it cannot be replayed") for run in runs]))


def _finished(path: Path, otherwise: str) -> History:
    history = history_of(path)
    if not history.finished:
        raise RunError(f"{path} is not finished, so {otherwise}; finish it first")
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
