"""The mean learning rate of a run with a VR optimizer, for a control of that run."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from bigbatch.errors import RunError
from bigbatch.log.history import history_of
from bigbatch_recipes.process_group import run_on_rank_zero


def mean_factor(path: Path, sizes: Mapping[str, int]) -> float:
    """The mean of r over the steps and weights of a run.

    The base optimizer at this multiple of lr has the mean rate of the weights that r scaled. The
    run's own steps are longer, as r is larger where the gradient is. Collective.

    Args:
        path: directory of the run.
        sizes: number of weights of each of its network's layers, by name.
    Raises:
        RunError: the run does not exist or is not finished, its optimizer has no r, or its network
            is another one.
    """
    return run_on_rank_zero(lambda: _mean(path, sizes))


def _mean(path: Path, sizes: Mapping[str, int]) -> float:
    history = history_of(path)
    if not history.finished:
        raise RunError(f"{path} is not finished, so its mean r is not known; finish it first")
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
