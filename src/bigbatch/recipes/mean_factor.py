"""The learning rate that another run with a VR optimizer had on average: a control for it."""

from pathlib import Path
from statistics import fmean

from bigbatch.errors import RunError
from bigbatch.recipes.ranks import from_leader
from bigbatch.report.metrics import history_of
from bigbatch.report.run_directory import RunDirectory


def mean_factor(path: Path) -> float:
    """The mean of r over the steps and layers of a run.

    A VR optimizer with r_max = 1 shortens every step by r; its base at this share of the rate takes
    steps of that length in all weights alike. Collective.

    Args:
        path: of the run.
    Raises:
        RunError: there is no such run, it is not finished, or its optimizer has no r.
    """
    return from_leader(lambda: _mean(path))


def _mean(path: Path) -> float:
    history = history_of(RunDirectory.open(path))
    if not history.finished:
        raise RunError(f"{path} is not finished, so its mean r is not known; finish it first")
    rows = [row["factors"] for row in history.rows if row.get("factors")]
    factors = [layer[0] for row in rows for layer in row.values() if layer[0] is not None]
    if not factors:
        raise RunError(f"{path} has no factors r; take a run with a VR optimizer")
    return fmean(factors)
