"""Training with DistributedDataParallel."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.log.step_record import StepRecord
from bigbatch.policies.controller import Controller
from bigbatch.training.distributed_state import DistributedState
from bigbatch_recipes.build_loop import build_loop, virtual_ranks_of
from bigbatch_recipes.engines.engine import Loss, State
from bigbatch_recipes.process_group import is_rank_zero, wrap_ddp
from bigbatch_recipes.recipe import Data
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import Settings


class DDP:
    """DistributedDataParallel; a single process trains the bare model.

    Args:
        model: the model on this rank's device.
        optimizer: its optimizer.
        data: the training data.
        settings: settings of the training.
        controller: decides the batch size.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        settings: Settings,
        controller: Controller,
    ) -> None:
        self.wrapped_model = wrap_ddp(model)
        self._model, self._optimizer, self._clip = model, optimizer, settings.clip
        uses_scaler = settings.precision == "float16"
        self._scaler = GradScaler(settings.device) if uses_scaler else None
        ranks = virtual_ranks_of(settings)
        self.train = build_loop(
            data, settings, self.wrapped_model, optimizer, controller, ranks, self._scaler
        )
        self._states = DistributedState(self.train)

    def steps(self, loss_of: Loss) -> Iterator[StepRecord]:
        """As `Engine` says."""
        for step in self.train:
            for batch in step:
                try:
                    step.backward(loss_of(batch))
                except Exception as error:
                    step.advise(error)
                    raise
            if self._clip:
                step.clip_grad_norm_(self._clip)
            yield step.update()

    def state_dict(self) -> State:
        """As `Engine` says; of all ranks on rank 0."""
        if callable(consolidate := getattr(self._optimizer, "consolidate_state_dict", None)):
            consolidate()
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler and self._scaler.state_dict(),
            "train": self._states.state_dict(),
        }

    def save(self, run: RunDirectory) -> None:
        """As `Engine` says."""
        state = self.state_dict()
        if is_rank_zero():
            run.save_checkpoint(state)

    def load_state_dict(self, state: State, path: Path) -> None:
        """As `Engine` says; each rank loads its own state, if their number is the same."""
        self._model.load_state_dict(state["model"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._states.load_state_dict(state["train"])  # collective, and may find that a rank is lost
