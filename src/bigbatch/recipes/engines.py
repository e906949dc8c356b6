"""What joins the ranks of a training: DistributedDataParallel, or DeepSpeed.

An engine owns the loop. It runs micro-batches backward, ends steps, saves and goes on; what a
micro-batch's loss is, and what is logged, it is told and does not know.
"""

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bigbatch.act.batches import Batches
from bigbatch.act.ledger import SampleLedger
from bigbatch.errors import RunError, SettingError
from bigbatch.loop import AdaptiveBatch
from bigbatch.optim import VarianceReduced
from bigbatch.recipes.data.drawn import drawn
from bigbatch.recipes.data.part import Part
from bigbatch.recipes.optimizers import build_controller
from bigbatch.recipes.ranks import count, gathered, joined, leads, rank
from bigbatch.recipes.recipe import Batch, Data
from bigbatch.recipes.settings import Settings
from bigbatch.record import StepRecord
from bigbatch.report.run_directory import RunDirectory
from bigbatch.step import attached_of

Weighed = Callable[[Batch], tuple[Tensor, float | None]]
"""Mean loss of a micro-batch, and what it is the mean over where that is not the samples."""

State = dict[str, Any]

_FOLDER = "deepspeed"  # of a run, with DeepSpeed's own checkpoint


class Engine(Protocol):
    """What a training asks of its engine.

    Args:
        joined: the model, called so that its gradients are those of all ranks.
        train: the loop, over this rank's share of the data.
    """

    joined: nn.Module
    train: AdaptiveBatch

    def steps(self, loss_of: Weighed) -> Iterator[StepRecord]:
        """Trains through one pass over the data, or the rest of it; one record a step."""

    def state_dict(self) -> State:
        """What `load_state_dict` needs beside what `save` leaves elsewhere. Collective."""

    def save(self, run: RunDirectory) -> None:
        """Replaces the run's checkpoint. Collective."""

    def load_state_dict(self, state: State, path: Path) -> None:
        """Goes on from the checkpoint of the run at `path`. Collective."""


class DDP:
    """DistributedDataParallel; one process alone goes without.

    Args:
        model: on this rank's device.
        optimizer: of its parameters.
        data: to train on.
        settings: of the training.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Data, settings: Settings
    ) -> None:
        self.joined = joined(model)
        self._model, self._optimizer, self._clip = model, optimizer, settings.clip
        half = settings.precision == "float16"
        self._scaler = GradScaler(settings.device) if half else None
        ranks = _virtual_ranks(settings)
        self.train = loop_over(data, settings, self.joined, optimizer, ranks, self._scaler)

    def steps(self, loss_of: Weighed) -> Iterator[StepRecord]:
        """As `Engine` says."""
        for step in self.train:
            for batch in step:
                try:
                    loss, weight = loss_of(batch)
                    step.backward(loss, weight=weight)
                except Exception as error:
                    step.advise(error)
                    raise
            if self._clip:
                step.clip_grad_norm_(self._clip)
            yield step.update()

    def state_dict(self) -> State:
        """As `Engine` says; of all ranks on rank 0."""
        attached = attached_of(self._optimizer)
        if attached is not None:
            attached.consolidate()
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler and self._scaler.state_dict(),
            "train": gathered(self.train.state_dict()),
        }

    def save(self, run: RunDirectory) -> None:
        """As `Engine` says."""
        state = self.state_dict()
        if leads():
            run.save_checkpoint(state)

    def load_state_dict(self, state: State, path: Path) -> None:
        """As `Engine` says; each rank from its own state, if there are as many."""
        of_ranks = state["train"]
        mine = of_ranks[rank() if len(of_ranks) == count() else 0]
        self._model.load_state_dict(state["model"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.train.load_state_dict(mine)  # with the other ranks, one of which may be gone


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
        from bigbatch.connect import deepspeed

        _require_float32(model)
        if not dist.is_initialized():  # one process, whom DeepSpeed wants in a group too
            os.environ.setdefault("LOCAL_RANK", "0")  # which it asks for
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._model, self._stage = model, settings.zero_stage
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            training_data=Batches(_loader(data, settings), virtual_ranks=_virtual_ranks(settings)),
            config=_config_of(settings),
            policy=build_controller(settings),
            adaptive_batch_params={"max_micro_batch_size": settings.micro_batch},
            lr_scaling=_scaling_of(settings),
        )
        if engine.device.type != settings.device:
            raise SettingError(
                f"device={settings.device}: DeepSpeed trains on {engine.device.type} here; set "
                f"device={engine.device.type}, or DS_ACCELERATOR={settings.device} for DeepSpeed"
            )
        self.joined: Any = engine
        self.train: AdaptiveBatch = engine.bigbatch

    def steps(self, loss_of: Weighed) -> Iterator[StepRecord]:
        """As `Engine` says."""
        for batch in self.joined.batches():
            loss, weight = loss_of(batch)
            self.joined.backward(loss, weight=weight)
            before = self.train.record
            self.joined.step()
            if self.train.record is not before and self.train.record is not None:
                yield self.train.record

    def state_dict(self) -> State:
        """As `Engine` says."""
        place = f"step{self.train.steps + self.train.skipped}"
        return {"model": self._model.state_dict(), "folder": place, "ranks": count()}

    def save(self, run: RunDirectory) -> None:
        """As `Engine` says; the folder before is taken away when nothing names it any more."""
        state, folder = self.state_dict(), run.path / _FOLDER
        self.joined.save_checkpoint(str(folder), state["folder"], save_latest=False)
        dist.barrier()
        if leads() and run.save_checkpoint(state):
            for old in folder.iterdir():
                if old.is_dir() and old.name != state["folder"]:
                    shutil.rmtree(old, ignore_errors=True)

    def load_state_dict(self, state: State, path: Path) -> None:
        """As `Engine` says.

        Raises:
            RunError: DeepSpeed's folder is gone, or it is of another number of ranks.
        """
        folder, ranks = path / _FOLDER, state["ranks"]
        if self._stage and ranks != count():
            raise RunError(
                f"{path} was saved by {ranks} ranks at zero_stage={self._stage}, whose pieces "
                f"{count()} cannot take; resume it on {ranks}"
            )
        if not (folder / state["folder"]).is_dir():
            raise RunError(
                f"{folder / state['folder']} is gone; delete checkpoint.pt to start the run anew"
            )
        self.joined.load_checkpoint(str(folder), state["folder"])


ENGINES: dict[str, Callable[[nn.Module, Optimizer, Data, Settings], Engine]] = {
    "ddp": DDP,
    "deepspeed": DeepSpeed,
}


def loop_over(
    data: Data,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    virtual_ranks: int,
    scaler: GradScaler | None = None,
    min_micro_batches: int | None = None,
) -> AdaptiveBatch:
    """The loop that settings name, over a data set.

    Raises:
        SettingError: the settings cannot work.
    """
    return AdaptiveBatch(
        model,
        optimizer,
        Batches(_loader(data, settings), virtual_ranks=virtual_ranks),
        policy=build_controller(settings),
        micro_batch=settings.micro_batch,
        min_micro_batches=min_micro_batches,
        lr_scaling=_scaling_of(settings),
        scaler=scaler,
    )


def stepped_by(optimizer: Optimizer) -> Optimizer:
    """Whose `step` an engine may call itself."""
    return optimizer.base if isinstance(optimizer, VarianceReduced) else optimizer


def _scaling_of(settings: Settings) -> str | None:
    return None if settings.lr_scaling == "none" else settings.lr_scaling


def _loader(data: Data, settings: Settings) -> DataLoader[Any]:
    part, samples = data.train, len(data.train)  # type: ignore[arg-type]
    if 0 < settings.samples < samples:
        part = Part(part, drawn(samples, settings.samples))
    return DataLoader(
        part,
        min(settings.base_batch, settings.micro_batch),
        sampler=SampleLedger(part, seed=settings.seed),  # type: ignore[arg-type]
        collate_fn=data.collate,
        num_workers=settings.workers,
    )


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


def _require_float32(model: nn.Module) -> None:
    if others := {p.dtype for p in model.parameters()} - {torch.float32}:
        raise SettingError(
            f"engine=deepspeed makes float32 of parameters, and {others.pop()} is asked for; leave "
            "engine out, or set the model to float32"
        )


def _virtual_ranks(settings: Settings) -> int:
    """Those of the settings, or the least multiple that the ranks divide."""
    needed = math.lcm(settings.virtual_ranks, count())
    if needed != settings.virtual_ranks:
        _note_other_groups(settings.virtual_ranks, count(), needed)
    return needed


@cache
def _note_other_groups(given: int, ranks: int, needed: int) -> None:
    """Once a process, not once a training of a study."""
    warnings.warn(
        f"virtual_ranks={given} is no multiple of the {ranks} ranks, so {needed} are used: other "
        "groups of samples, and another run, than on fewer ranks",
        stacklevel=4,
    )
