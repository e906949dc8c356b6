"""One training, from settings to a finished run directory; killed at any moment, it continues."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from bigbatch.errors import RankError, RunError
from bigbatch.experiments.build_optimizer import build_optimizer, stepped_by
from bigbatch.experiments.distributed_eval import device_of, moved, sound_scores
from bigbatch.experiments.engines import ENGINES
from bigbatch.experiments.init_from_run import init_from
from bigbatch.experiments.lr_control import mean_factor
from bigbatch.experiments.lr_schedule import LRSchedule
from bigbatch.experiments.process_group import from_first, from_leader, leads, rank
from bigbatch.experiments.recipe import Batch, Data, Recipe
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.validate import CAST, require_trainable
from bigbatch.gradients import is_of_network
from bigbatch.policies.amounts import Amount
from bigbatch.policies.parse import target_of
from bigbatch.runs.console import LiveView
from bigbatch.runs.html_report import write_report
from bigbatch.runs.metrics import Scores, history_of, row_of
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.tensorboard import TensorBoardLog
from bigbatch.training.oom_hints import is_out_of_memory
from bigbatch.training.step_record import StepRecord

LogStep = Callable[[StepRecord, Scores | None], None]

_APART = 1_000_003  # between the seeds of two ranks


def train_run(training: "Training", run: RunDirectory, view: LiveView, label: str) -> None:
    """Trains the run to its end, from its latest checkpoint where there is one. Collective.

    Raises:
        RunError: another process trains in it, its checkpoint is damaged, or not all of its files
            could be written.
    """
    with ExitStack() as stack:
        from_leader(lambda: stack.enter_context(run.lock()))
        _load(training, run)
        unfinished = training.train.epoch < training.settings.epochs
        if unfinished:
            from_leader(lambda: run.save_texts(training.data.keeps))
            training.to_the_end(run, view, label)
        from_leader(lambda: _end(run, trained=unfinished))


def _end(run: RunDirectory, *, trained: bool) -> None:
    """Says that the training diverged, and writes the report where there is none of all of it."""
    report = run.path / "report.html"
    if trained and (reason := history_of(run).divergence):
        warnings.warn(f"{run.name} diverged: {reason}; lower lr", stacklevel=2)
    if trained or not report.exists():
        write_report([run], report, run.name)
    run.require_all_written()


def _load(training: "Training", run: RunDirectory) -> None:
    """Brings back the latest checkpoint, of which nothing is kept while it trains on."""
    saved = from_leader(run.load_checkpoint)
    if saved is not None:
        training.load_state_dict(saved, run.path)


class Training:
    """Model, optimizer and loop of one run: everything that a checkpoint has to bring back.

    Args:
        recipe: what is trained.
        settings: with which numbers.
    Raises:
        SettingError: the settings cannot work.
    """

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        require_trainable(recipe, settings)  # before data are read, which may take long
        self.settings = settings
        torch.set_num_threads(settings.threads)
        _seed(settings.seed)
        self.device = device_of(settings)
        self.model = recipe.model(settings).to(self.device)
        if settings.init_from:
            init_from(Path(settings.init_from), self.model)
        share = 1.0
        if settings.lr_control_from:
            sizes = {name: weights.numel() for name, weights in self.model.named_parameters()}
            share = mean_factor(Path(settings.lr_control_from), sizes)
        self.optimizer = build_optimizer(
            settings, self.model.named_parameters(), recipe.without_vr(settings, self.model), share
        )
        self.data: Data = recipe.data(settings)
        self.loss_of = recipe.loss(settings)
        if not leads():
            _seed((settings.seed + rank() * _APART) % 2**32)  # other dropout and augmentation
        self.engine = ENGINES[settings.engine](self.model, self.optimizer, self.data, settings)
        self.train, self.joined = self.engine.train, self.engine.joined
        self.train.scheduler = self._scheduler()

    def _scheduler(self) -> LambdaLR | None:
        """One tick a base batch, at whose middle the schedule is read."""
        if self.settings.lr_schedule == "constant":
            return None
        schedule, samples = LRSchedule(self.settings.lr_schedule), self.train.batches.samples or 0
        factor = schedule.over(self.settings.epochs, samples)
        if leads() and (note := schedule.note(self.settings.epochs, samples)):
            warnings.warn(note, stacklevel=2)
        base = self.settings.base_batch
        return LambdaLR(stepped_by(self.optimizer), lambda tick: factor((tick + 0.5) * base))

    def to_the_end(self, run: RunDirectory, view: LiveView, label: str) -> None:
        """Trains, logs, shows and saves until the last epoch is done; rank 0 alone writes."""
        settings, train = self.settings, self.train
        epoch = train.batches.samples or 0
        evaluation, checkpoint = (
            Amount.parse(text) for text in (settings.evaluate_every, settings.checkpoint_every)
        )
        with ExitStack() as shown:
            log = shown.enter_context(self._log(run, view, label)) if leads() else None
            for _ in train.epochs(settings.epochs):
                for record in self.engine.steps(self.loss):
                    done = record.step, train.samples, record.batch_size
                    is_last = train.samples == settings.epochs * epoch
                    evaluates = is_last or evaluation.ends_in_step(*done, epoch)
                    scores = self.scores() if evaluates else None
                    if log is not None:
                        log(record, scores)
                    if checkpoint.ends_in_step(*done, epoch):
                        self.engine.save(run)
        self.engine.save(run)

    def loss(self, batch: Batch) -> Tensor:
        """Mean over a micro-batch's samples."""
        with self._cast():
            return self.loss_of(self.joined, moved(batch, self.device))

    def scores(self) -> dict[str, float]:
        """Of the model as it is. Collective."""
        from_first(self.model.buffers())
        self.model.eval()
        with torch.no_grad(), self._cast():
            scores = sound_scores(self.model, self.data.scores, self.device)
        self.model.train()
        return scores

    def _cast(self) -> torch.autocast:
        return autocast(self.device.type, self.settings.precision)

    @contextmanager
    def _log(self, run: RunDirectory, view: LiveView, label: str) -> Iterator[LogStep]:
        """Writes and shows each step with the scores after it."""
        train, total = self.train, self.settings.epochs * (self.train.batches.samples or 0)
        target = target_of(self.settings.policy, self.settings.target)
        with (
            TensorBoardLog(run, train.steps + train.skipped + 1) as events,
            view.training(label, total, train.samples, target) as shown,
        ):

            def log(record: StepRecord, scores: Scores | None) -> None:
                row = row_of(record, scores)
                run.append(row)
                events.append(row)
                shown.step(record, scores)

            yield log

    def state_dict(self) -> dict[str, Any]:
        """What the engine keeps in checkpoint.pt; of all ranks on rank 0. Collective."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Continues from the checkpoint found in `path`, as the engine does.

        Raises:
            RunError: it does not fit.
        """
        try:
            self.engine.load_state_dict(state, path)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RunError | RankError):
                raise
            if is_of_network(error) or is_out_of_memory(error):
                raise  # the checkpoint may be as good as ever
            raise RunError(
                f"the checkpoint in {path} does not fit its recipe ({type(error).__name__}: "
                f"{error}); resume it with the release that wrote it, or delete it to start again"
            ) from error


def autocast(device: str, precision: str) -> torch.autocast:
    """In which a model of that precision is run."""
    return torch.autocast(device, CAST.get(precision), enabled=precision in CAST)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what users' data sets draw from
    torch.manual_seed(seed)
