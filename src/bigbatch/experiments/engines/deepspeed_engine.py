"""A training whose ranks DeepSpeed joins, and its checkpoints."""

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
from bigbatch.experiments.build_loop import batches_of, scaling_of, virtual_ranks_of
from bigbatch.experiments.build_optimizer import build_controller
from bigbatch.experiments.engines.engine import Loss, State
from bigbatch.experiments.process_group import count, from_leader, leads
from bigbatch.experiments.recipe import Data
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.torchrun import backend
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step_record import StepRecord

_FOLDER = "deepspeed"  # of a run, with DeepSpeed's own checkpoint


class DeepSpeed:
    """DeepSpeed at one of its ZeRO stages; its checkpoint lies in a folder of the run's.

    Args:
        model: on this rank's device.
        optimizer: of its parameters.
        data: to train on.
        settings: of the training.
    Raises:
        SettingError: what DeepSpeed, or its connection, cannot do.
        MissingPackageError: it is not installed.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Data, settings: Settings
    ) -> None:
        from bigbatch.integrations import deepspeed

        if not dist.is_initialized():  # one process, whom DeepSpeed wants in a group too
            os.environ.setdefault("LOCAL_RANK", "0")  # which it asks for
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend(), store=store, rank=0, world_size=1)
        self._model, self._stage = model, settings.zero_stage
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            training_data=batches_of(data, settings, virtual_ranks_of(settings)),
            config=_config_of(settings),
            policy=build_controller(settings),
            adaptive_batch_params={"max_micro_batch_size": settings.micro_batch},
            lr_scaling=scaling_of(settings),
        )
        if engine.device.type != settings.device:
            raise SettingError(
                f"device={settings.device}: DeepSpeed trains on {engine.device.type} here; set "
                f"device={engine.device.type}, or DS_ACCELERATOR={settings.device} for DeepSpeed"
            )
        self.joined: Any = engine
        self.train: AdaptiveBatch = engine.bigbatch

    def steps(self, loss_of: Loss) -> Iterator[StepRecord]:
        """As `Engine` says."""
        for batch in self.joined.batches():
            self.joined.backward(loss_of(batch))
            before = self.train.record
            self.joined.step()
            if self.train.record is not before and self.train.record is not None:
                yield self.train.record

    def state_dict(self) -> State:
        """As `Engine` says.

        The last step of an epoch may be saved twice, before and after its end: in two folders, so
        that none is written over which checkpoint.pt names.
        """
        place = f"epoch{self.train.epoch}-step{self.train.steps + self.train.skipped}"
        return {"model": self._model.state_dict(), "folder": place, "ranks": count()}

    def save(self, run: RunDirectory) -> None:
        """As `Engine` says; a folder that nothing names is taken away.

        On several ranks an error of writing is raised: the others wait for this one in DeepSpeed.
        """
        state, folder = self.state_dict(), run.path / _FOLDER
        try:
            self.joined.save_checkpoint(str(folder), state["folder"], save_latest=False)
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            if count() > 1:
                raise
            run.warn_checkpoint_not_written(error)
            shutil.rmtree(folder / state["folder"], ignore_errors=True)
            return
        dist.barrier()
        if leads():
            state["digests"] = file_digests(folder / state["folder"])  # after the barrier: of all
            _keep_one(folder, state["folder"], newest=run.save_checkpoint(state))

    def load_state_dict(self, state: State, path: Path) -> None:
        """As `Engine` says.

        Raises:
            RunError: DeepSpeed's folder is gone or damaged, or it is of another number of ranks.
        """
        folder, ranks = path / _FOLDER, state["ranks"]
        if self._stage and ranks != count():
            raise RunError(
                f"{path} was saved by {ranks} ranks at zero_stage={self._stage}, whose shards "
                f"{count()} cannot take; resume it on {ranks}"
            )
        if not (folder / state["folder"]).is_dir():
            raise RunError(
                f"{folder / state['folder']} is gone; delete checkpoint.pt to start the run again"
            )
        from_leader(lambda: _require_unchanged(folder / state["folder"], state["digests"]))
        self.joined.load_checkpoint(str(folder), state["folder"])


def _require_unchanged(folder: Path, digests: dict[str, str]) -> None:
    try:
        require_digests(folder, digests)
    except StateError as error:
        raise RunError(
            f"{error}; restore it from a copy, or delete checkpoint.pt to start the run again"
        ) from None


def _keep_one(folder: Path, name: str, *, newest: bool) -> None:
    """Takes away the folders before the one of that name, or that one alone."""
    for one in folder.iterdir():
        if one.is_dir() and (one.name != name) == newest:
            shutil.rmtree(one, ignore_errors=True)


def _config_of(settings: Settings) -> State:
    """DeepSpeed's; batch sizes follow the plan from the first step on."""
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
