"""One training, from settings to a finished run directory; killed at any moment, it goes on."""

import random
from pathlib import Path
from typing import Any

import numpy
import torch

from bigbatch.decide.named import target_of
from bigbatch.errors import RunError
from bigbatch.loop import AdaptiveBatch
from bigbatch.recipes.recipe import Recipe, Settings, Task, build_controller, build_optimizer
from bigbatch.report.events import Events
from bigbatch.report.live import LiveView
from bigbatch.report.metrics import row_of
from bigbatch.report.page import write_report
from bigbatch.report.run_directory import RunDirectory


def train_run(training: "Training", run: RunDirectory, view: LiveView, label: str) -> None:
    """Trains the run to its end, from its latest checkpoint where there is one.

    Raises:
        RunError: another process trains in it, or its checkpoint is damaged.
    """
    with run.locked():
        saved = run.load_checkpoint()
        if saved is not None:
            training.load_state_dict(saved, run.path)
        report = run.path / "report.html"
        unfinished = training.train.epoch < training.settings.epochs
        if unfinished:
            training.to_the_end(run, view, label)
        if unfinished or not report.exists():
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
        random.seed(settings.seed)
        numpy.random.seed(settings.seed)  # noqa: NPY002  # what users' data sets draw from
        torch.manual_seed(settings.seed)
        self.task: Task = recipe.build(settings)
        self.optimizer = build_optimizer(settings, self.task.model.named_parameters())
        self.train = AdaptiveBatch(
            self.task.model,
            self.optimizer,
            self.task.loader,
            policy=build_controller(settings),
            micro_batch=settings.micro_batch,
            lr_scaling=None if settings.lr_scaling == "none" else settings.lr_scaling,
        )

    def to_the_end(self, run: RunDirectory, view: LiveView, label: str) -> None:
        """Trains, logs, shows and saves until the last epoch is done."""
        settings, train = self.settings, self.train
        per_epoch = train.batches.samples or 0
        target = target_of(settings.policy, settings.target)
        total = settings.epochs * per_epoch
        with (
            Events(run, train.steps + train.skipped + 1) as events,
            view.training(label, total, train.samples, target) as shown,
        ):
            for _ in train.epochs(settings.epochs):
                for step in train:
                    for batch in step:
                        step.backward(self.task.loss_of(batch))
                    record = step.update()
                    ends_epoch = train.samples % per_epoch == 0
                    accuracy = self.task.accuracy() if ends_epoch else None
                    row = row_of(record, accuracy)
                    run.append(row)
                    events.append(row)
                    shown.step(record, accuracy)
                    if record.step % settings.checkpoint_every == 0:
                        run.save_checkpoint(self.state_dict())
        run.save_checkpoint(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on bit for bit."""
        return {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.train.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Goes on from the checkpoint found in `path`.

        Raises:
            RunError: it does not fit.
        """
        try:
            self.task.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.train.load_state_dict(state["train"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise RunError(
                f"the checkpoint in {path} does not fit its recipe ({type(error).__name__}: "
                f"{error}); resume it with the release that wrote it, or delete it to start anew"
            ) from error
