"""The protocol of an engine, which runs a training on its ranks.

An engine owns the loop: it runs backwards of micro-batches, ends steps, saves and resumes. Its
caller computes the loss of a micro-batch, and logs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from bigbatch.log.step_record import StepRecord
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.recipe import Batch
from bigbatch_recipes.run_directory import RunDirectory

Loss = Callable[[Batch], Tensor]  # the mean over a micro-batch's samples

State = dict[str, Any]


class Engine(Protocol):
    """Runs a training on its ranks.

    Args:
        wrapped_model: the model in a wrapper that reduces its gradients over all ranks.
        train: the loop, over this rank's share of the data.
    """

    wrapped_model: nn.Module
    train: AdaptiveBatch

    def steps(self, loss_of: Loss) -> Iterator[StepRecord]:
        """Trains for one epoch, or the rest of it; yields one record per step."""

    def state_dict(self) -> State:
        """The state that `load_state_dict` needs, without files that `save` writes. Collective."""

    def save(self, run: RunDirectory) -> None:
        """Replaces the run's checkpoint. Collective."""

    def load_state_dict(self, state: State, path: Path) -> None:
        """Restores the checkpoint of the run at `path`. Collective."""
