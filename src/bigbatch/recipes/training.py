"""One training, from settings to a finished run directory; killed at any moment, it goes on."""

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bigbatch.act.advice import is_out_of_memory
from bigbatch.act.batches import Batches
from bigbatch.act.ledger import SampleLedger
from bigbatch.decide.named import target_of
from bigbatch.errors import RunError
from bigbatch.loop import AdaptiveBatch
from bigbatch.measure.source import is_of_network
from bigbatch.recipes.begin import begin_from
from bigbatch.recipes.data.drawn import drawn
from bigbatch.recipes.data.part import Part
from bigbatch.recipes.lr_schedule import LRSchedule
from bigbatch.recipes.mean_factor import mean_factor
from bigbatch.recipes.optimizers import build_controller, build_optimizer
from bigbatch.recipes.ranks import count, from_first, from_leader, gathered, joined, leads, rank
from bigbatch.recipes.recipe import Data, Recipe
from bigbatch.recipes.scores import device_of, moved
from bigbatch.recipes.settings import Settings
from bigbatch.record import StepRecord
from bigbatch.report.events import Events
from bigbatch.report.live import LiveView
from bigbatch.report.metrics import Scores, row_of
from bigbatch.report.page import write_report
from bigbatch.report.run_directory import RunDirectory
from bigbatch.step import Step, attached_of

Log = Callable[[StepRecord, Scores | None], None]

_APART = 1_000_003  # between the seeds of two ranks
_CAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def train_run(training: "Training", run: RunDirectory, view: LiveView, label: str) -> None:
    """Trains the run to its end, from its latest checkpoint where there is one. Collective.

    Raises:
        RunError: another process trains in it, or its checkpoint is damaged.
    """
    with ExitStack() as held:
        from_leader(lambda: held.enter_context(run.locked()))
        saved = from_leader(run.load_checkpoint)
        if saved is not None:
            training.load_state_dict(saved, run.path)
        report = run.path / "report.html"
        unfinished = training.train.epoch < training.settings.epochs
        if unfinished:
            if leads():
                run.keep(training.data.keeps)
            training.to_the_end(run, view, label)
        if leads() and (unfinished or not report.exists()):
            write_report([run], report, run.name)


class Training:
    """Model, optimizer and loop of one run: everything that a checkpoint has to bring back.

    Args:
        recipe: what is trained.
        settings: with which numbers.
    Raises:
        SettingError: the settings cannot work.
    """

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        self.settings = settings
        self._weight = recipe.weight
        torch.set_num_threads(settings.threads)
        _seed(settings.seed)
        self.device = device_of(settings)
        self.model = recipe.model(settings).to(self.device)
        if settings.begin_from:
            begin_from(Path(settings.begin_from), self.model)
        self.data: Data = recipe.data(settings)
        self.loss_of = recipe.loss(settings)
        rate = settings.lr * (mean_factor(Path(settings.lr_from)) if settings.lr_from else 1.0)
        self.optimizer = build_optimizer(
            settings.changed({"lr": rate}),
            self.model.named_parameters(),
            recipe.without_vr(settings, self.model),
        )
        self.joined = joined(self.model)
        self.scaler = GradScaler(self.device.type) if settings.precision == "float16" else None
        if not leads():
            _seed((settings.seed + rank() * _APART) % 2**32)  # other dropout and augmentation
        self.train = loop_over(
            self.data, settings, self.joined, self.optimizer, _virtual_ranks(settings), self.scaler
        )
        self.train.scheduler = self._scheduler()

    def _scheduler(self) -> LambdaLR | None:
        """One tick a base batch, at whose middle the schedule is read."""
        if self.settings.lr_schedule == "constant":
            return None
        schedule = LRSchedule(self.settings.lr_schedule)
        factor = schedule.over(self.settings.epochs, self.train.batches.samples or 0)
        return LambdaLR(
            self.optimizer, lambda tick: factor((tick + 0.5) * self.settings.base_batch)
        )

    def to_the_end(self, run: RunDirectory, view: LiveView, label: str) -> None:
        """Trains, logs, shows and saves until the last epoch is done; rank 0 alone writes."""
        settings, train = self.settings, self.train
        per_epoch = train.batches.samples or 0
        with ExitStack() as shown:
            log = shown.enter_context(self._log(run, view, label)) if leads() else None
            for _ in train.epochs(settings.epochs):
                for step in train:
                    record = self._finished(step)
                    scores = self.scores() if train.samples % per_epoch == 0 else None
                    if log is not None:
                        log(record, scores)
                    if record.step % settings.checkpoint_every == 0:
                        self._save(run)
        self._save(run)

    def _finished(self, step: Step) -> StepRecord:
        """What is known of a step after its micro-batches and its update."""
        for batch in step:
            batch = moved(batch, self.device)
            try:
                with self._cast():
                    loss = self.loss_of(self.joined, batch)
                step.backward(loss, weight=self._weight and self._weight(batch))
            except Exception as error:
                step.advise(error)
                raise
        if self.settings.clip:
            step.clip_grad_norm_(self.settings.clip)
        return step.update()

    def scores(self) -> dict[str, float]:
        """Of the model as it is. Collective."""
        from_first(self.model.buffers())
        self.model.eval()
        with torch.no_grad(), self._cast():
            scores = self.data.scores(self.model)
        self.model.train()
        return scores

    def _cast(self) -> torch.autocast:
        return autocast(self.device.type, self.settings.precision)

    @contextmanager
    def _log(self, run: RunDirectory, view: LiveView, label: str) -> Iterator[Log]:
        """Writes and shows each step with the scores after it."""
        train, total = self.train, self.settings.epochs * (self.train.batches.samples or 0)
        target = target_of(self.settings.policy, self.settings.target)
        with (
            Events(run, train.steps + train.skipped + 1) as events,
            view.training(label, total, train.samples, target) as shown,
        ):

            def log(record: StepRecord, scores: Scores | None) -> None:
                row = row_of(record, scores)
                run.append(row)
                events.append(row)
                shown.step(record, scores)

            yield log

    def _save(self, run: RunDirectory) -> None:
        state = self.state_dict()
        if leads():
            run.save_checkpoint(state)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on bit for bit; of all ranks on rank 0. Collective."""
        attached = attached_of(self.optimizer)
        if attached is not None:
            attached.consolidate()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "train": gathered(self.train.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Goes on from the checkpoint found in `path`: each rank from its own state, if as many.

        Raises:
            RunError: it does not fit.
        """
        try:
            of_ranks = state["train"]
            mine = of_ranks[rank() if len(of_ranks) == count() else 0]
            self.model.load_state_dict(state["model"])
            if self.scaler is not None:
                self.scaler.load_state_dict(state["scaler"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if is_of_network(error) or is_out_of_memory(error):
                raise  # the checkpoint may be as good as ever
            raise _misfit(error, path) from error
        try:
            self.train.load_state_dict(mine)  # with the other ranks, one of which may be gone
        except (KeyError, TypeError, ValueError) as error:
            raise _misfit(error, path) from error


def autocast(device: str, precision: str) -> torch.autocast:
    """In which a model of that precision is run."""
    return torch.autocast(device, _CAST.get(precision), enabled=precision in _CAST)


def loop_over(
    data: Data,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    virtual_ranks: int,
    scaler: GradScaler | None = None,
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
        lr_scaling=None if settings.lr_scaling == "none" else settings.lr_scaling,
        scaler=scaler,
    )


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


def _misfit(error: Exception, path: Path) -> RunError:
    return RunError(
        f"the checkpoint in {path} does not fit its recipe ({type(error).__name__}: {error}); "
        "resume it with the release that wrote it, or delete it to start anew"
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what users' data sets draw from
    torch.manual_seed(seed)


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
