"""Training with DeepSpeed, and its checkpoints."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bigbatch.digest import file_digests, require_digests
from bigbatch.errors import RunError, SettingError, StateError
from bigbatch.log.step_record import StepRecord
from bigbatch.policies.controller import Controller
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.build_loop import batches_of, interval_of, lr_scaling_of, virtual_ranks_of
from bigbatch_recipes.engines.engine import Loss, State
from bigbatch_recipes.process_group import is_rank_zero, run_on_rank_zero, world_size
from bigbatch_recipes.recipe import Data
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.torchrun import backend

_FOLDER = "deepspeed"  # of a run, with DeepSpeed's own checkpoint


class DeepSpeed:
    """DeepSpeed at one of its ZeRO stages; its checkpoint is a folder in the run directory.

    Args:
        model: the model on this rank's device.
        optimizer: its optimizer.
        data: the training data.
        settings: settings of the training.
        controller: decides the batch size.
    Raises:
        SettingError: DeepSpeed, or its integration, does not support a setting.
        MissingPackageError: DeepSpeed is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        settings: Settings,
        controller: Controller,
    ) -> None:
        from bigbatch.integrations import deepspeed

        if not dist.is_initialized():  # DeepSpeed needs a group for one process too
            os.environ.setdefault("LOCAL_RANK", "0")  # which DeepSpeed reads
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend(), store=store, rank=0, world_size=1)
        self._model, self._stage = model, settings.zero_stage
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            training_data=batches_of(data, settings, virtual_ranks_of(settings)),
            config=_config_of(settings),
            policy=controller,
            adaptive_batch_params={"max_micro_batch_size": settings.micro_batch},
            lr_scaling=lr_scaling_of(settings),
            min_micro_batches=settings.min_micro_batches,
            **interval_of(settings),
        )
        if engine.device.type != settings.device:
            raise SettingError(
                f"device={settings.device}: DeepSpeed trains on {engine.device.type} here; set "
                f"device={engine.device.type}, or DS_ACCELERATOR={settings.device} for DeepSpeed"
            )
        self.wrapped_model: Any = engine
        self.train: AdaptiveBatch = engine.bigbatch

    def steps(self, loss_of: Loss) -> Iterator[StepRecord]:
        """As `Engine` says."""
        for batch in self.wrapped_model.batches():
            self.wrapped_model.backward(loss_of(batch))
            before = self.train.record
            self.wrapped_model.step()
            if self.train.record is not before and self.train.record is not None:
                yield self.train.record

    def state_dict(self) -> State:
        """As `Engine` says.

        The last step of an epoch may be saved twice, before and after the epoch's end: in two
        folders, so that the folder in checkpoint.pt is never overwritten.
        """
        folder = f"epoch{self.train.epoch}-step{self.train.steps + self.train.skipped}"
        return {"model": self._model.state_dict(), "folder": folder, "ranks": world_size()}

    def save(self, run: RunDirectory) -> None:
        """As `Engine` says; deletes the folder of the checkpoint before.

        On several ranks a write error is raised, since the others wait for this one in DeepSpeed.
        """
        state, folder = self.state_dict(), run.path / _FOLDER
        try:
            self.wrapped_model.save_checkpoint(str(folder), state["folder"], save_latest=False)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            if world_size() > 1:
                raise
            run.warn_checkpoint_not_written(error)
            shutil.rmtree(folder / state["folder"], ignore_errors=True)
            return
        dist.barrier()
        if is_rank_zero():  # after the barrier all ranks' files are there
            state["digests"] = file_digests(folder / state["folder"])
            _keep_one(folder, state["folder"], newest=run.save_checkpoint(state))

    def load_state_dict(self, state: State, path: Path) -> None:
        """As `Engine` says.

        Raises:
            RunError: DeepSpeed's folder is missing or damaged, or of another number of ranks.
        """
        folder, ranks = path / _FOLDER, state["ranks"]
        if self._stage and ranks != world_size():
            raise RunError(
                f"{path} was saved by {ranks} ranks at zero_stage={self._stage}, whose shards "
                f"{world_size()} cannot take; resume it on {ranks}"
            )
        if not (folder / state["folder"]).is_dir():
            raise RunError(
                f"{folder / state['folder']} is gone; delete checkpoint.pt to start the run again"
            )
        run_on_rank_zero(lambda: _require_unchanged(folder / state["folder"], state["digests"]))
        self.wrapped_model.load_checkpoint(str(folder), state["folder"])


def _require_unchanged(folder: Path, digests: dict[str, str]) -> None:
    try:
        require_digests(folder, digests)
    except StateError as error:
        raise RunError(
            f"{error}; restore it from a copy, or delete checkpoint.pt to start the run again"
        ) from None


def _keep_one(folder: Path, name: str, *, newest: bool) -> None:
    """Deletes all folders but the one of that name, or that one alone."""
    for path in folder.iterdir():
        if path.is_dir() and (path.name != name) == newest:
            shutil.rmtree(path, ignore_errors=True)


def _config_of(settings: Settings) -> State:
    """DeepSpeed's config; the plan sets the batch sizes from the first step on."""
    config: State = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    if settings.precision != "float32":
        config["torch_autocast"] = {"enabled": True, "dtype": settings.precision}
    return config
