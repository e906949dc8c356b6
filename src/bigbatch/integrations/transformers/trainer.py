"""The Trainer whose updates are steps of an AdaptiveBatch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from bigbatch.errors import LoopError
from bigbatch.integrations.accelerate import PreparedBatches, batches
from bigbatch.integrations.transformers.callback_handler import Length, SafeCallbackHandler
from bigbatch.integrations.transformers.checkpoint import load, save
from bigbatch.integrations.transformers.split_step import SplitOptimizer, SplitScheduler, SplitStep
from bigbatch.integrations.transformers.step_batch import (
    BackwardOutsideStep,
    EpochLoader,
    StepBatch,
    count_labels,
)
from bigbatch.integrations.transformers.trainer_checks import (
    require_arguments,
    require_overridable,
    require_trainer,
    warn_of_growth,
)
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy
from bigbatch.setting_types import checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions, copy_options, loop_options
from bigbatch.training.step import Step

if TYPE_CHECKING:
    from transformers import Trainer as NextClass
else:
    NextClass = object  # whichever the mixin is put before


class AdaptiveMixin(NextClass):
    """Makes a Trainer, or a class made from it, choose its batch size.

        class MyTrainer(AdaptiveMixin, Seq2SeqTrainer): ...

    Every update of the Trainer is a step of an AdaptiveBatch over the Trainer's own loader, whose
    batches of `per_device_train_batch_size` are cut to size. What else `Trainer` does stays: its
    callbacks, logs, evaluation, checkpoints. `training_step` of a class that comes after the mixin
    gets micro-batches; one made from it overrides `compute_loss`.

    Args:
        args: all positional ones of the Trainer.
        policy: decides the batch size after every update.
        batch_size: where it starts, in samples over all processes; default: that of a `Fixed`
            policy, or `per_device_train_batch_size` times the processes.
        base_batch: batch size that `learning_rate` was tuned for; default `batch_size`.
        micro_batch: most samples in one backward; default `per_device_train_batch_size`.
        fixed_micro_batch, min_micro_batches, lr_scaling: as for `AdaptiveBatch`.
        meter: makes a GradientMeter of the prepared model, where it needs options:
            `lambda model: bb.GradientMeter(model, every=4)`.
        others: all named ones of the Trainer.
    Raises:
        SettingError: a setting of the Trainer that cannot work, with the remedy.
    """

    @checked
    def __init__(
        self,
        *args: Any,
        policy: Policy | Controller,
        meter: Callable[[nn.Module], GradientMeter] | None = None,
        **others: Any,
    ) -> None:
        require_overridable(type(self), AdaptiveMixin)
        require_arguments([*args, *others.values()])
        self.adaptive: AdaptiveBatch | None = None
        self.accelerator: Any
        self.callback_handler: Any
        self.optimizer: Any
        self.lr_scheduler: Any
        self._halves = SplitStep()
        self._prepared_batches: PreparedBatches | None = None
        self._saved: dict[str, Any] | None = None
        own = {name: others.pop(name) for name in LoopOptions.__annotations__ if name in others}
        self._settings: dict[str, Any] = {"policy": policy, "meter": meter, **loop_options(**own)}
        super().__init__(*args, **others)
        require_trainer(self)
        self.callback_handler = SafeCallbackHandler(self.callback_handler)
        self.callback_handler.callbacks.insert(0, Length(self._training, self.callback_handler))

    def train(self, *args: Any, **others: Any) -> Any:
        """As the Trainer's; an exception leaves learning rates as the schedule has them."""
        try:
            return super().train(*args, **others)
        except BaseException as error:
            self._halves.leave(error)
            raise

    # before the first update

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """As the Trainer's, for updates whose number is not known beforehand."""
        said = super().set_initial_training_values(args, dataloader)
        epochs, updates, examples, trained, _, in_epoch, max_steps = said
        self._prepared_batches = batches(self.accelerator, dataloader, placed=False)
        start, base = self._sizes()
        samples = self._prepared_batches.whole or examples
        self._base_steps = max_steps
        if has_length(dataloader):
            updates = in_epoch = samples + 1  # at most, and the pass is seen to end
        if args.max_steps > 0:
            epochs = max(epochs, max_steps)  # at most
            warn_of_growth(args, self._settings["policy"])
        else:
            self._base_steps = math.ceil(args.num_train_epochs * samples / base)
            max_steps = math.ceil(args.num_train_epochs * samples)  # at most, until one was made
            if self._prepared_batches.whole is not None:
                max_steps = math.ceil(max_steps / start)
        return epochs, updates, examples, trained, start, in_epoch, max_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's, for the optimizer that AdaptiveBatch steps."""
        return super().create_scheduler(num_training_steps, optimizer or _inside(self.optimizer))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        self._take_apart()
        model, _ = super()._prepare_for_training(
            self._base_steps, train_dataloader, resume_from_checkpoint
        )
        settings = copy_options(self._settings)  # `train` may be called again
        if settings["meter"] is not None:
            settings["meter"] = settings["meter"](model)
        assert self._prepared_batches is not None
        self.adaptive = AdaptiveBatch(
            model,
            _inside(self.optimizer),
            self._prepared_batches,
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            **settings,
        )
        self.optimizer = SplitOptimizer(self.optimizer, self._halves)
        self.lr_scheduler = SplitScheduler(self.lr_scheduler, self.optimizer, self._halves)
        self.callback_handler.optimizer = self.optimizer
        self.callback_handler.lr_scheduler = self.lr_scheduler
        if self._saved is not None:
            self.adaptive.load_state_dict(self._saved)
        return model, EpochLoader(self.adaptive, resumed=self._saved is not None)

    def _take_apart(self) -> None:
        """Undoes what an earlier training has put around the optimizer and the model."""
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

    def _sizes(self) -> tuple[int, int]:
        """The batch size that training starts with, and the base batch."""
        policy, start = self._settings["policy"], self._settings.get("batch_size")
        if isinstance(policy, Controller):
            return policy.decision.batch_size, policy.base_batch
        assert self._prepared_batches is not None
        size = self._prepared_batches.batch_size or self._train_batch_size
        start = start or getattr(policy, "batch_size", None) or size * self.args.world_size
        return start, self._settings.get("base_batch") or start

    # an update

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """One element: the whole update; none at the end of the pass, which ends the epoch."""
        step = next(epoch_iterator, None)
        if step is None:
            self.control.should_epoch_stop = True
            return [], None
        if not isinstance(step, Step):  # a loader of somebody else's
            raise LoopError(
                f"the epoch gave a {type(step).__name__} and no step; leave the loader that "
                "_prepare_for_training returns in place"
            )
        main = getattr(self.model, "main_input_name", "input_ids")
        kept = self.args.include_num_input_tokens_seen == "non_padding"
        return [StepBatch(step, main, kept=kept)], None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """All micro-batches of an update; its mean loss over all processes."""
        if not isinstance(inputs, StepBatch):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        for micro_batch in inputs.step:
            inputs.add(micro_batch)
            items = self._items(micro_batch)
            count = None if items is None else torch.tensor(max(items, 1), device=self.args.device)
            with self._backward_of(inputs.step, items):
                super().training_step(model, micro_batch, count)
        self._halves.step = inputs.step
        return torch.tensor(inputs.step.loss, device=self.args.device)

    @contextmanager
    def _backward_of(self, step: Step, items: int | None) -> Iterator[None]:
        """Inside, the Trainer takes the mean over a micro-batch, and its backward is the step's."""
        accelerator, across = self.accelerator, self.args.average_tokens_across_devices
        self.accelerator = BackwardOutsideStep(
            accelerator, lambda loss: step.backward(loss, weight=items)
        )
        self.args.average_tokens_across_devices = False  # done by the weights
        try:
            yield
        finally:
            self.accelerator = accelerator
            self.args.average_tokens_across_devices = across

    def _items(self, inputs: Any) -> int | None:
        """What the loss of a micro-batch is the mean over, where that is not its samples."""
        counts_items = self.compute_loss_func is not None or self.label_smoother is not None
        if not (counts_items or self.model_accepts_loss_kwargs):
            return None
        return count_labels(inputs, shifted=self._loss_shifts_labels)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        assert self._halves.step is not None
        return self._halves.step.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self._halves.step is not None
        norm = self._halves.step.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def log(self, logs: dict[str, float], *args: Any, **others: Any) -> None:
        """As the Trainer's, with what the last update measured."""
        record = None if self.adaptive is None else self.adaptive.record
        if "loss" in logs and record is not None:
            measured = {
                "batch_size": record.batch_size,
                "samples": record.samples,
                "similarity": record.similarity,
                "noise_scale": record.noise_scale,
            }
            logs |= {name: value for name, value in measured.items() if math.isfinite(value)}
        super().log(logs, *args, **others)

    # checkpoints

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        train = self._training()
        samples = train.batches.samples
        epochs = train.epoch if samples is None else train.samples // samples
        save(Path(output_dir), self.args.process_index, epochs, train.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if callable(
            consolidate := getattr(_inside(self.optimizer), "consolidate_state_dict", None)
        ):
            consolidate()
        super()._save_optimizer_and_scheduler(output_dir)

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is None:
            self._saved = None
            return 0, 0
        epochs, self._saved = load(Path(resume_from_checkpoint), self.args.process_index)
        return epochs, 0  # batches that the Trainer need not skip


class AdaptiveTrainer(AdaptiveMixin, Trainer):
    """Hugging Face's Trainer with a batch size that follows a policy.

        trainer = AdaptiveTrainer(
            model=model, args=args, train_dataset=data,
            policy=bb.SimiGrad(target=0.2, min_batch=32, max_batch=2048),
        )
        trainer.train()

    Its arguments are those of `AdaptiveMixin`.
    """


def _inside(optimizer: Any) -> Any:
    """The optimizer that accelerate has prepared, as it was."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
