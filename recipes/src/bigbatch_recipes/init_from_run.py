"""Initial weights from another run, of this recipe or another one."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from bigbatch.errors import RunError
from bigbatch.log.history import history_of
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
    if not history_of(path).finished:
        raise RunError(f"{path} is not finished, so nothing can begin from it; finish it first")
    state = run.load_weights()
    if state is None:
        raise RunError(f"{path} has no checkpoint to begin from; train it first")
    return state
