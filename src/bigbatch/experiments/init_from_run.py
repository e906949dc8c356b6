"""A model that begins with the weights of another run, of this recipe or the one before it."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.errors import RunError
from bigbatch.experiments.process_group import is_rank_zero, run_on_rank_zero
from bigbatch.runs.metrics import history_of
from bigbatch.runs.run_directory import RunDirectory


def init_from(path: Path, model: nn.Module) -> None:
    """Fills the model with the run's weights, by name; says which of them are others. Collective.

    Raises:
        RunError: there is no such run, it is not finished, has no checkpoint, or none
            of its weights fit.
    """
    found = run_on_rank_zero(lambda: _weights(path))
    own = model.state_dict()
    taken = {
        name: value
        for name, value in found.items()
        if name in own and own[name].shape == value.shape
    }
    if not taken:
        raise RunError(f"no weight of {path} fits this model; begin from a run of the same network")
    model.load_state_dict(taken, strict=False)
    if is_rank_zero() and (missing := sorted(own.keys() - taken.keys())):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warnings.warn(
            f"{len(taken)} of {len(own)} tensors begin as {path} left them; new are {shown}",
            stacklevel=2,
        )


def _weights(path: Path) -> dict[str, Any]:
    run = RunDirectory.open(path)
    if not history_of(run).finished:
        raise RunError(f"{path} is not finished, so nothing can begin from it; finish it first")
    state = run.load_weights()
    if state is None:
        raise RunError(f"{path} has no checkpoint to begin from; train it first")
    return state
