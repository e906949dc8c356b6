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

from bigbatch.act.advice import is_out_of_memory
from bigbatch.act.batches import Batches
from bigbatch.decide.named import target_of
from bigbatch.errors import RunError
from bigbatch.loop import AdaptiveBatch
from bigbatch.measure.source import is_of_network
from bigbatch.recipes.ranks import count, from_leader, gathered, joined, leads, rank
from bigbatch.recipes.recipe import Recipe, Settings, Task, build_controller, build_optimizer
from bigbatch.record import StepRecord
from bigbatch.report.events import Events
from bigbatch.report.live import LiveView
from bigbatch.report.metrics import row_of
from bigbatch.report.page import write_report
from bigbatch.report.run_directory import RunDirectory
from bigbatch.step import attached_of

Log = Callable[[StepRecord, float | None], None]

_APART = 1_000_003  # between the seeds of two ranks


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
        torch.set_num_threads(settings.threads)
        _seed(settings.seed)
        self.task: Task = recipe.build(settings)
        self.optimizer = build_optimizer(settings, self.task.model.named_parameters())
        self.model = joined(self.task.model)
        if not leads():
            _seed((settings.seed + rank() * _APART) % 2**32)  # other dropout and augmentation
        self.train = AdaptiveBatch(
            self.model,
            self.optimizer,
            Batches(self.task.loader, virtual_ranks=_virtual_ranks(settings)),
            policy=build_controller(settings),
            micro_batch=settings.micro_batch,
            lr_scaling=None if settings.lr_scaling == "none" else settings.lr_scaling,
        )

    def to_the_end(self, run: RunDirectory, view: LiveView, label: str) -> None:
        """Trains, logs, shows and saves until the last epoch is done; rank 0 alone writes."""
        settings, train = self.settings, self.train
        per_epoch = train.batches.samples or 0
        with ExitStack() as shown:
            log = shown.enter_context(self._log(run, view, label)) if leads() else None
            for _ in train.epochs(settings.epochs):
                for step in train:
                    for batch in step:
                        try:
                            step.backward(self.task.loss_of(self.model, batch))
                        except Exception as error:
                            step.advise(error)
                            raise
                    record = step.update()
                    if log is not None:
                        ends_epoch = train.samples % per_epoch == 0
                        log(record, self.task.accuracy() if ends_epoch else None)
                    if record.step % settings.checkpoint_every == 0:
                        self._save(run)
        self._save(run)

    @contextmanager
    def _log(self, run: RunDirectory, view: LiveView, label: str) -> Iterator[Log]:
        """Writes and shows each step with the accuracy after it."""
        train, total = self.train, self.settings.epochs * (self.train.batches.samples or 0)
        target = target_of(self.settings.policy, self.settings.target)
        with (
            Events(run, train.steps + train.skipped + 1) as events,
            view.training(label, total, train.samples, target) as shown,
        ):

            def log(record: StepRecord, accuracy: float | None) -> None:
                row = row_of(record, accuracy)
                run.append(row)
                events.append(row)
                shown.step(record, accuracy)

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
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
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
            self.task.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if is_of_network(error) or is_out_of_memory(error):
                raise  # the checkpoint may be as good as ever
            raise _misfit(error, path) from error
        try:
            self.train.load_state_dict(mine)  # with the other ranks, one of which may be gone
        except (KeyError, TypeError, ValueError) as error:
            raise _misfit(error, path) from error


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
