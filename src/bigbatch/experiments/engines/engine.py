"""What a training asks of the engine that runs it on its ranks.

An engine owns the loop: it runs micro-batches backward, ends steps, saves and resumes. Its caller
says what the loss of a micro-batch is, and what is logged.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from bigbatch.experiments.recipe import Batch
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step_record import StepRecord

Loss = Callable[[Batch], Tensor]  # the mean over a micro-batch's samples

State = dict[str, Any]


class Engine(Protocol):
    """What a training asks of its engine.

    Args:
        wrapped_model: the model, called so that its gradients are those of all ranks.
        train: the loop, over this rank's share of the data.
    """

    wrapped_model: nn.Module
    train: AdaptiveBatch

    def steps(self, loss_of: Loss) -> Iterator[StepRecord]:
        """Trains through one pass over the data, or the rest of it; one record a step."""

    def state_dict(self) -> State:
        """What `load_state_dict` needs in addition to what `save` leaves elsewhere. Collective."""

    def save(self, run: RunDirectory) -> None:
        """Replaces the run's checkpoint. Collective."""

    def load_state_dict(self, state: State, path: Path) -> None:
        """Continues from the checkpoint of the run at `path`. Collective."""
