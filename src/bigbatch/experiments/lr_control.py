"""The learning rate that another run with a VR optimizer had on average: a control for it."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from bigbatch.errors import RunError
from bigbatch.experiments.process_group import run_on_rank_zero
from bigbatch.runs.metrics import history_of
from bigbatch.runs.run_directory import RunDirectory


def mean_factor(path: Path, sizes: Mapping[str, int]) -> float:
    """The mean of r over the steps and weights of a run.

    Its base at this share of the rate has the mean rate of the weights that were stepped with r, in
    all of them alike. The run's own steps are longer, as r is larger where the gradient is.
    Collective.

    Args:
        path: of the run.
        sizes: weights of each of its network's layers, by name.
    Raises:
        RunError: there is no such run, it is not finished, its optimizer has no r, or its network
            is another.
    """
    return run_on_rank_zero(lambda: _mean(path, sizes))


def _mean(path: Path, sizes: Mapping[str, int]) -> float:
    history = history_of(RunDirectory.open(path))
    if not history.finished:
        raise RunError(f"{path} is not finished, so its mean r is not known; finish it first")
    rows = [row["gsnr"] for row in history.rows if row.get("gsnr")]
    known = [(name, r) for row in rows for name, (r, *_) in row.items() if r is not None]
    if not known:
        raise RunError(f"{path} has no factors r; take a run with a VR optimizer")
    if strange := next((name for name, _ in known if name not in sizes), None):
        raise RunError(
            f"{path} has a layer {strange}, which is none of this network's; take a run "
            "of the same network"
        )
    return fmean([r for _, r in known], [sizes[name] for name, _ in known])
