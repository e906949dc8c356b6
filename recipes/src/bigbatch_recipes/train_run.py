"""One training, from settings to a finished run directory; it resumes after a kill."""

import math
import random
import warnings
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from bigbatch.errors import RankError, RunError, SettingError
from bigbatch.gradients import is_of_network
from bigbatch.log.history import history_of
from bigbatch.log.html_report import write_report
from bigbatch.log.step_record import StepRecord
from bigbatch.policies.amounts import Amount
from bigbatch.training.distributed_state import DistributedState
from bigbatch.training.oom_hints import is_out_of_memory
from bigbatch_recipes import process_group
from bigbatch_recipes.build_loop import base_of, build_controller, build_loop, build_optimizer
from bigbatch_recipes.console import LiveView, TrainingView
from bigbatch_recipes.datasets.in_memory import Subset, chosen_indices
from bigbatch_recipes.distributed_eval import device_of, finite_scores, to_device
from bigbatch_recipes.earlier_runs import init_from, mean_factor
from bigbatch_recipes.lr_schedule import LRSchedule
from bigbatch_recipes.recipe import Batch, Data, Recipe
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import Settings, policy_settings
from bigbatch_recipes.validate import CAST, require_trainable


def hold_out(data: Data, settings: Settings) -> Data:
    """The data without `held_out` random training samples, the same for all seeds; scores of those.

    Raises:
        SettingError: they are all training samples or more, or the recipe cannot score them.
    """
    if not settings.held_out:
        return data
    samples = len(data.train)  # type: ignore[arg-type]
    if settings.held_out >= samples:
        raise SettingError(
            f"held_out={settings.held_out} leaves none of the {samples} training samples; lower it"
        )
    if data.scores_on is None:
        raise SettingError(
            f"recipe {settings.recipe!r} cannot score samples of its training data; leave held_out "
            "out"
        )
    held_out = chosen_indices(samples, settings.held_out)
    trained = sorted(set(range(samples)) - set(held_out))
    return Data(
        Subset(data.train, trained),
        data.scores_on(Subset(data.train, held_out)),
        run_files=data.run_files,
    )


_SEED_STEP = 1_000_003  # between the seeds of two ranks


def train_run(training: "Training", run: RunDirectory, view: LiveView, label: str) -> None:
    """Trains the run to its end, from its latest checkpoint where there is one. Collective.

    Args:
        training: the training of the run.
        run: the run directory.
        view: shows the progress.
        label: name of the run in the view.
    """
    with closing(run.log):
        checkpoint = process_group.run_on_rank_zero(run.load_checkpoint)
        if checkpoint is not None:
            training.load_state_dict(checkpoint, run.path)
            del checkpoint  # its memory is free during the training
        unfinished = training.train.epoch < training.settings.epochs
        if unfinished:
            process_group.run_on_rank_zero(lambda: run.save_texts(training.data.run_files))
            training.train_epochs(run, view, label)
        process_group.run_on_rank_zero(lambda: _finish(run, trained=unfinished))


def _finish(run: RunDirectory, *, trained: bool) -> None:
    """Warns if the training diverged, and writes the report unless it is up to date."""
    report = run.path / "report.html"
    history = history_of(run.path)
    if trained and history.divergence:
        warnings.warn(f"{run.name} diverged: {history.divergence}; lower lr", stacklevel=2)
    if history.rows and (trained or not report.exists()):
        write_report([history], report, run.name)
    if trained:
        run.require_all_written()


class Training:
    """Model, optimizer and loop of one run: everything that a checkpoint restores.

    Raises:
        SettingError: the settings cannot work.
    """

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        require_trainable(recipe, settings)  # before data are read, which may take long
        self.settings = settings
        torch.set_num_threads(settings.threads)
        _seed_python(settings.seed)
        torch.manual_seed(settings.seed)
        self.device = device_of(settings)
        self.model = recipe.model(settings).to(self.device)
        if settings.init_from:
            init_from(Path(settings.init_from), self.model)
        parameters, without_vr = dict(self.model.named_parameters()), recipe.without_vr
        lr_factor = 1.0
        if settings.lr_control_from:
            sizes = {name: parameter.numel() for name, parameter in parameters.items()}
            lr_factor = mean_factor(Path(settings.lr_control_from), sizes)
        self.optimizer = build_optimizer(
            settings, parameters.items(), without_vr(settings, self.model), lr_factor
        )
        self.data: Data = hold_out(recipe.data(settings), settings)
        self.loss_of = recipe.loss(settings)
        # other dropout and augmentation on each rank; again on rank 0, as the first import of a
        # package may draw from Python's numbers: sklearn.datasets does
        seed = (settings.seed + process_group.rank() * _SEED_STEP) % 2**32
        _seed_python(seed)
        if not process_group.is_rank_zero():
            torch.manual_seed(seed)
        self.wrapped_model = process_group.wrap_ddp(self.model)
        self._scaler = GradScaler(settings.device) if settings.precision == "float16" else None
        self.train = build_loop(
            self.data,
            settings,
            self.wrapped_model,
            self.optimizer,
            build_controller(settings),
            self._scaler,
        )
        self.train.scheduler = self._scheduler()
        self._states = DistributedState(self.train)

    def _scheduler(self) -> LambdaLR | None:
        """A scheduler with one step per base batch, which reads the schedule at its middle."""
        if self.settings.lr_schedule == "constant":
            return None
        schedule, samples = LRSchedule(self.settings.lr_schedule), self.train.batches.samples or 0
        factor = schedule.lr_lambda(self.settings.epochs, samples)
        if process_group.is_rank_zero() and (
            note := schedule.truncation_warning(self.settings.epochs, samples)
        ):
            warnings.warn(note, stacklevel=2)
        base = self.settings.base_batch
        return LambdaLR(base_of(self.optimizer), lambda tick: factor((tick + 0.5) * base))

    def train_epochs(self, run: RunDirectory, view: LiveView, label: str) -> None:
        """Trains, logs, shows and saves until the last epoch ends; rank 0 alone writes."""
        settings, train = self.settings, self.train
        epoch_samples = train.batches.samples or 0
        total = settings.epochs * epoch_samples
        evaluation = Amount.parse(settings.evaluate_every)
        checkpoint = Amount.parse(settings.checkpoint_every)
        target = settings.target if "target" in policy_settings(settings.policy) else None
        progress = TrainingView(view, label, total, train.samples, target)
        for _ in train.epochs(settings.epochs):
            for record in self.steps():
                position = record.step, train.samples, record.batch_size, epoch_samples
                evaluates = train.samples == total or ends_in_step(evaluation, *position)
                scores = self.scores() if evaluates else {}
                if process_group.is_rank_zero():
                    run.log.record(record, **scores)
                    progress.step(record, scores)
                if ends_in_step(checkpoint, *position):
                    self._save(run)
        self._save(run)

    def steps(self) -> Iterator[StepRecord]:
        """Trains for one epoch, or the rest of it; yields one record per step."""
        for step in self.train:
            for batch in step:
                try:
                    step.backward(self.loss(batch))
                except Exception as error:
                    step.advise(error)
                    raise
            if self.settings.clip:
                step.clip_grad_norm_(self.settings.clip)
            yield step.update()

    def _save(self, run: RunDirectory) -> None:
        state = self.state_dict()
        if process_group.is_rank_zero():
            run.save_checkpoint(state)

    def loss(self, batch: Batch) -> Tensor:
        """Mean over a micro-batch's samples."""
        with self._autocast():
            return self.loss_of(self.wrapped_model, to_device(batch, self.device))

    def scores(self) -> dict[str, float]:
        """The scores of the model now. Collective."""
        process_group.broadcast_tensors(self.model.buffers())
        self.model.eval()
        with torch.no_grad(), self._autocast():
            scores = finite_scores(self.model, self.data.scores, self.device)
        self.model.train()
        return scores

    def _autocast(self) -> torch.autocast:
        return autocast(self.device.type, self.settings.precision)

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoint.pt; of all ranks on rank 0. Collective."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler and self._scaler.state_dict(),
            "train": self._states.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Restores the state of the checkpoint in `path`.

        Raises:
            RunError: the checkpoint does not fit the recipe.
        """
        try:
            self.model.load_state_dict(state["model"])
            if self._scaler is not None:
                self._scaler.load_state_dict(state["scaler"])
            self.optimizer.load_state_dict(state["optimizer"])
            self._states.load_state_dict(state["train"])  # collective; may find that a rank is lost
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RunError | RankError):
                raise
            if is_of_network(error) or is_out_of_memory(error):
                raise  # the checkpoint may be intact
            raise RunError(
                f"the checkpoint in {path} does not fit its recipe ({type(error).__name__}: "
                f"{error}); resume it with the release that wrote it, or delete it to start again"
            ) from error


def ends_in_step(period: Amount, steps: int, samples: int, batch_size: int, epoch: int) -> bool:
    """Whether a multiple of the period is reached in the last step; `epoch` is in samples."""
    start = samples - batch_size
    before = period.times(start, steps - 1, Fraction(start, epoch))
    return math.floor(period.times(samples, steps, Fraction(samples, epoch))) > math.floor(before)


def autocast(device: str, precision: str) -> torch.autocast:
    """The autocast context of a precision."""
    return torch.autocast(device, CAST.get(precision), enabled=precision in CAST)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # users' data sets may draw from it
