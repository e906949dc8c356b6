"""A Trainer whose updates are steps of an AdaptiveBatch."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer
from transformers.trainer_utils import has_length

from bigbatch.digest import load_state, save_state
from bigbatch.errors import LoopError, StateError
from bigbatch.integrations.accelerate import (
    PreparedBatches,
    batches,
    prepared_meter,
    torch_optimizer,
    torch_scheduler,
)
from bigbatch.integrations.transformers.callback_handler import Length, SafeCallbackHandler
from bigbatch.integrations.transformers.trainer_checks import (
    require_arguments,
    require_overridable,
    require_trainer,
    warn_of_growth,
)
from bigbatch.integrations.transformers.trainer_step import (
    EpochLoader,
    SplitOptimizer,
    SplitScheduler,
    SplitStep,
    StepBatch,
    count_labels,
)
from bigbatch.log.step_record import StepRecord
from bigbatch.optim.variance_reduced import VarianceReduced, micro_batch_optimizer
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy, needs_of
from bigbatch.setting_types import checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions, copy_options, loop_options
from bigbatch.training.loss_weights import mean_over_labels
from bigbatch.training.step import Step

if TYPE_CHECKING:
    from transformers import Trainer as NextClass
else:
    NextClass = object  # the class after the mixin

_SPEED = ("_runtime", "_per_second", "_time")  # ends of the names of an evaluation's times
_STATE_FILE = "adaptive_batch_{}.pt"  # one per process, in the folder of a checkpoint


class AdaptiveMixin(NextClass):
    """Makes a Trainer, or a subclass of it, choose its batch size.

        class MyTrainer(AdaptiveMixin, Seq2SeqTrainer): ...

    Every update of the Trainer is a step of an AdaptiveBatch over the Trainer's own loader, whose
    batches of `per_device_train_batch_size` are cut to size. Callbacks, logs, evaluation and
    checkpoints of `Trainer` are unchanged. `training_step` of a class after the mixin gets
    micro-batches; a subclass of the mixin overrides `compute_loss`.

    Args:
        args: all positional arguments of the Trainer.
        policy: decides the batch size after every update.
        batch_size: initial batch size in samples over all processes; default: that of a `Fixed`
            policy, or `per_device_train_batch_size` times the number of processes.
        base_batch: batch size that `learning_rate` was tuned for; default `batch_size`.
        micro_batch: maximum samples in one backward; default `per_device_train_batch_size`.
        fixed_micro_batch, min_micro_batches, lr_scaling, transport, every, log: as for
            `AdaptiveBatch`.
        groups: as for `AdaptiveBatch`; the labels of each sample are its weight.
        meter: function that makes a GradientMeter of the prepared model, if it needs options:
            `functools.partial(bb.GradientMeter, confidence=0.9)`; on DeepSpeed it gets source= too.
        kwargs: all keyword arguments of the Trainer.
    Raises:
        SettingError: a setting of the Trainer is not supported; the message has the remedy.
    """

    @checked
    def __init__(
        self,
        *args: Any,
        policy: Policy | Controller,
        meter: Callable[[nn.Module], GradientMeter] | None = None,
        **kwargs: Any,
    ) -> None:
        require_overridable(type(self), AdaptiveMixin)
        require_arguments([*args, *kwargs.values()])
        self.adaptive: AdaptiveBatch | None = None
        self.accelerator: Any
        self.callback_handler: Any
        self.optimizer: Any
        self.lr_scheduler: Any
        self._split_step = SplitStep()
        self._vr_optimizer: VarianceReduced | None = None  # around the one that DeepSpeed has
        self._prepared_batches: PreparedBatches | None = None
        self._checkpoint: dict[str, Any] | None = None  # the state to resume from
        self._logged: StepRecord | None = None  # the last measurement that was logged
        names = [name for name in LoopOptions.__annotations__ if name in kwargs]
        options = loop_options(**{name: kwargs.pop(name) for name in names})
        self._settings: dict[str, Any] = {"policy": policy, "meter": meter, **options}
        super().__init__(*args, **kwargs)
        require_trainer(self, options)
        self.callback_handler = SafeCallbackHandler(self.callback_handler)
        self.callback_handler.callbacks.insert(0, Length(self._training, self.callback_handler))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; an exception leaves the learning rates at those of the schedule."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            self._split_step.abort(error)
            raise

    # before the first update

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """As the Trainer's, for a number of updates that is not known in advance."""
        values = super().set_initial_training_values(args, dataloader)
        epochs, updates, examples, trained, _, in_epoch, max_steps = values
        self._prepared_batches = batches(
            self.accelerator, dataloader, placed=False, packed=_packs(self.data_collator)
        )
        batch_size, base_batch = self._initial_batch_sizes()
        samples = self._prepared_batches.global_samples or examples
        self._base_steps = max_steps
        if has_length(dataloader):
            updates = in_epoch = samples + 1  # upper bounds, beyond the end of the pass
        if args.max_steps > 0:
            epochs = max(epochs, max_steps)  # an upper bound
            warn_of_growth(args, self._settings["policy"])
        else:
            self._base_steps = math.ceil(args.num_train_epochs * samples / base_batch)
            max_steps = math.ceil(args.num_train_epochs * samples)  # an upper bound for now
            if self._prepared_batches.global_samples is not None:
                max_steps = math.ceil(max_steps / batch_size)
        return epochs, updates, examples, trained, batch_size, in_epoch, max_steps

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; DeepSpeed gets the optimizer inside a variance-reduced one."""
        self.optimizer = super().create_optimizer(*args, **kwargs)
        vr_optimizer = micro_batch_optimizer(self.optimizer)
        if vr_optimizer is not None and self.is_deepspeed_enabled:
            self._vr_optimizer, self.optimizer = vr_optimizer, vr_optimizer.base
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's, for the optimizer that AdaptiveBatch steps."""
        return super().create_scheduler(
            num_training_steps, optimizer or torch_optimizer(self.optimizer)
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            raise LoopError(
                "the Trainer has an engine of DeepSpeed already, of an earlier train(), evaluate() "
                "or predict(); make another Trainer of the model, or set eval_on_start=True to "
                "evaluate before the first update"
            )
        self._unwrap_all()
        model, _ = super()._prepare_for_training(
            self._base_steps, train_dataloader, resume_from_checkpoint
        )
        settings = copy_options(self._settings)  # kept as they are for another call of `train`
        optimizer = self._vr_optimizer or torch_optimizer(self.optimizer)
        if settings["meter"] is not None or self.is_deepspeed_enabled:
            settings["meter"] = prepared_meter(
                self.accelerator, model, optimizer, settings["meter"]
            )
        assert self._prepared_batches is not None
        self.adaptive = AdaptiveBatch(
            model,
            optimizer,
            self._prepared_batches,
            scheduler=torch_scheduler(self.lr_scheduler, optimizer),
            scaler=self.accelerator.scaler,
            **settings,
        )
        self.optimizer = SplitOptimizer(self.optimizer, self._split_step)
        self.lr_scheduler = SplitScheduler(self.lr_scheduler, self.optimizer, self._split_step)
        self.callback_handler.optimizer = self.optimizer
        self.callback_handler.lr_scheduler = self.lr_scheduler
        if self._checkpoint is not None:
            self.adaptive.load_state_dict(self._checkpoint)
        return model, EpochLoader(self.adaptive, resumed=self._checkpoint is not None)

    def _unwrap_all(self) -> None:
        """Removes the wrappers and hooks of an earlier training."""
        if isinstance(self.optimizer, SplitOptimizer):
            self.optimizer = self.optimizer.prepared
        if isinstance(self.lr_scheduler, SplitScheduler):
            self.lr_scheduler = self.lr_scheduler.scheduler
        if self.adaptive is not None:
            self.adaptive.meter.close()
            self.adaptive = None

    def _training(self) -> AdaptiveBatch:
        assert self.adaptive is not None
        return self.adaptive

    def _initial_batch_sizes(self) -> tuple[int, int]:
        """The initial batch size and the base batch."""
        policy, batch_size = self._settings["policy"], self._settings.get("batch_size")
        if isinstance(policy, Controller):
            return policy.decision.batch_size, policy.base_batch
        assert self._prepared_batches is not None
        size = self._prepared_batches.batch_size or self._train_batch_size
        batch_size = batch_size or needs_of(policy).batch_size or size * self.args.world_size
        return batch_size, self._settings.get("base_batch") or batch_size

    # an update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """One batch with all micro-batches of an update; none at the end of the pass and epoch."""
        step = next(epoch_iterator, None)
        if step is None:
            self.control.should_epoch_stop = True
            return [], None
        if not isinstance(step, Step):  # another loader
            raise LoopError(
                f"the loader yielded a {type(step).__name__} and not a step; keep the loader that "
                "_prepare_for_training returns"
            )
        main_input = getattr(self.model, "main_input_name", "input_ids")
        keep_values = self.args.include_num_input_tokens_seen == "non_padding"
        return [StepBatch(step, main_input, keep_values=keep_values)], None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trains on all micro-batches of an update; returns its mean loss over all processes."""
        if not isinstance(inputs, StepBatch):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        for micro_batch in inputs.step:
            inputs.add(micro_batch)
            items = self._items(micro_batch)
            total = None if items is None else int(items.sum())
            count = None if total is None else torch.tensor(max(total, 1), device=self.args.device)
            has_groups = self._training().meter.groups is not None
            with self._backward_of(inputs.step, items if has_groups else total):
                super().training_step(model, micro_batch, count)
        self._split_step.step = inputs.step
        return torch.tensor(inputs.step.loss, device=self.args.device)

    @contextmanager
    def _backward_of(self, step: Step, weight: int | Tensor | None) -> Iterator[None]:
        """Inside, the Trainer averages over one micro-batch, and its backward is the step's.

        A mean cross entropy is weighted by its own divisor, which class weights change.
        """
        accelerator, average = self.accelerator, self.args.average_tokens_across_devices
        self.accelerator = copy.copy(accelerator)
        self.accelerator.backward = lambda loss, **_: step.backward(
            loss, weight=weight if mean_over_labels(loss) is None else None
        )
        self.args.average_tokens_across_devices = False  # the weights do it
        try:
            yield
        finally:
            self.accelerator = accelerator
            self.args.average_tokens_across_devices = average

    def _items(self, inputs: Any) -> Tensor | None:
        """Items of each sample that the loss of a micro-batch averages over; None for samples."""
        counts_items = self.compute_loss_func is not None or self.label_smoother is not None
        if not (counts_items or self.model_accepts_loss_kwargs):
            return None
        return count_labels(inputs, shifted=self._loss_shifts_labels)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        assert self._split_step.step is not None
        return self._split_step.step.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self._split_step.step is not None
        norm = self._split_step.step.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the last update, and the last measurement since the last log.

        What an evaluation measured, without its speed, is added to the log of the training.
        """
        train = self.adaptive
        record = None if train is None else train.record
        if train is not None and record is not None:
            if "loss" in logs:
                measured = train.last_measured
                logs |= _metrics_of(record, None if measured is self._logged else measured)
                self._logged = measured
            if train.run_log is not None:
                scores = [n for n in logs if n.startswith("eval_") and not n.endswith(_SPEED)]
                numbers = [n for n in scores if isinstance(logs[n], (int, float))]
                train.log(**{name: logs[name] for name in numbers})
        super().log(logs, *args, **kwargs)

    # checkpoints

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        train = self._training()
        samples = train.batches.samples
        epochs = train.epoch if samples is None else train.samples // samples
        save_rank_state(Path(output_dir), self.args.process_index, epochs, train.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        consolidate = getattr(torch_optimizer(self.optimizer), "consolidate_state_dict", None)
        if callable(consolidate):
            consolidate()
        super()._save_optimizer_and_scheduler(output_dir)

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is None:
            self._checkpoint = None
            return 0, 0
        epochs, self._checkpoint = load_rank_state(
            Path(resume_from_checkpoint), self.args.process_index
        )
        return epochs, 0  # the Trainer skips no batches


class AdaptiveTrainer(AdaptiveMixin, Trainer):
    """Hugging Face's Trainer with a batch size that follows a policy.

        trainer = AdaptiveTrainer(
            model=model, args=args, train_dataset=data,
            policy=bb.SimiGrad(target=0.2, min_batch=32, max_batch=2048),
        )
        trainer.train()

    It has the arguments of `AdaptiveMixin`.
    """


def save_rank_state(folder: Path, rank: int, epochs: int, state: dict[str, Any]) -> None:
    """Saves the state of one process in the folder of a checkpoint."""
    with (folder / _STATE_FILE.format(rank)).open("wb") as file:
        save_state({"epochs": epochs, "train": state}, file)


def load_rank_state(folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
    """Epochs and state of this process; those of the first process if no file has this rank."""
    for file in (folder / _STATE_FILE.format(rank), folder / _STATE_FILE.format(0)):
        if file.exists():
            with file.open("rb") as stream:
                saved = load_state(stream, str(file))
            return saved["epochs"], saved["train"]
    raise StateError(
        f"{folder} has no {_STATE_FILE.format(0)}: AdaptiveTrainer did not save it, or saved it "
        "with save_only_model=True; load the model from it, and train without "
        "resume_from_checkpoint"
    )


def _metrics_of(record: StepRecord, measured: StepRecord | None) -> dict[str, float]:
    """What is logged of the last update, and of a measurement that was not logged before."""
    metrics: dict[str, float] = {"batch_size": record.batch_size, "samples": record.samples}
    if measured is not None:
        metrics |= {"similarity": measured.similarity, "noise_scale": measured.noise_scale}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _packs(collator: Any) -> bool:
    """Whether a collate function makes one row of packed sequences, as padding-free ones do."""
    is_flat = isinstance(collator, DataCollatorWithFlattening)
    return is_flat or getattr(collator, "padding_free", False) is True  # TRL's
