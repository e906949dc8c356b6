"""A Lightning callback that changes the batch size at every step: `Trainer(callbacks=[...])`."""

import gc
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import BatchError, LoopError, SettingError
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.integrations.lightning.accumulation import LoaderBatchesPerBaseBatch, base_batch_of
from bigbatch.integrations.lightning.lightning_checks import (
    loaders_batch,
    require_drivable,
    require_scheduler,
    taken_clipping,
    taken_scheduler,
    warn_of_end,
)
from bigbatch.integrations.lightning.step_logger import StepLogger
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy, require_policy
from bigbatch.setting_types import checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions, copy_options
from bigbatch.training.optimizer_checks import ensure_step_hooks
from bigbatch.training.step import Step

_NO_LOSS = (
    "training_step gave no loss for a batch, so the step lacks a micro-batch; return a loss times "
    "0 there, and leave the batch out in the loader where it should not count"
)

_NO_STEP = (
    "the optimizer's step() was not called where Lightning does; leave optimizer_step() of the "
    "module as it is, or let it call optimizer.step(closure=closure) every time"
)

_LEFT = (
    "on_train_batch_start() returned -1, which leaves an epoch within a step; leave batches out in "
    "the loader, or use Trainer(limit_train_batches=)"
)


class AdaptiveBatchCallback(Callback):
    """Measures, decides and acts inside a `Trainer`: one more callback, the script as it was.

        Trainer(callbacks=[AdaptiveBatchCallback(SimiGrad(target=0.3, max_batch=8192))])

    One batch of the training loader on one rank is a micro-batch, and the accumulation changes from
    step to step: the batch moves by ranks x the loader's batch size. With one device, with DDP and
    with FSDP2 (`ModelParallelStrategy`). What the keywords mean is said in `AdaptiveBatch`.

    `train` is that, from the start of the training on: `callback.train.record` the last step.

    Args:
        policy: decides the batch size after every step; or a `Controller`.
        options: batch_size, base_batch, min_micro_batches and lr_scaling as for `AdaptiveBatch`;
            micro_batch: samples in a batch of the loader, where it does not say that itself. A
            scheduler with interval="step" is advanced once per base batch.
        meter: makes the meter of the model that the strategy has wrapped, with options say:
            `functools.partial(GradientMeter, every=4, confidence=0.9)`.
        count: samples in a batch; default: as Lightning counts them for `self.log`.
    Raises:
        SettingError: at the start of `fit`, for what cannot work together, with the remedy.
    Example:
        >>> from bigbatch import SimiGrad
        >>> callback = AdaptiveBatchCallback(SimiGrad(target=0.3), batch_size=256, base_batch=64)
        >>> trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False)
    """

    @checked
    def __init__(
        self,
        policy: Policy | Controller,
        *,
        meter: Callable[[Any], GradientMeter] = GradientMeter,
        count: Callable[[Batch], int] = extract_batch_size,
        **options: Unpack[LoopOptions],
    ) -> None:
        if not isinstance(policy, Controller):
            require_policy(policy)
        self.train: AdaptiveBatch | None = None
        if "fixed_micro_batch" in options:
            raise SettingError(
                "fixed_micro_batch: a micro-batch is a batch of the loader here; leave it out"
            )
        self._micro_batch, self._meter, self._count = options.pop("micro_batch", None), meter, count
        self._settings: dict[str, Any] = {"policy": policy, **options}
        self._driven: ExternalLoop | None = None
        self._loaded: dict[str, Any] | None = None  # a checkpoint's state, until there is a loop
        self._backward, self._update = ExitStack(), ExitStack()  # what Lightning is in the midst of
        self._given = ExitStack()  # what is given back in the end
        self._trains = True  # not while the trainer tests or predicts, which loads states too
        self._place = (0, 1)  # rank and ranks
        self._clip: float | None = None
        self._log = StepLogger()

    # the beginning and the end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what cannot work, before anything is started."""
        self._trains = stage == "fit"
        if self._trains:
            require_drivable(trainer, pl_module)
            self.train = self._driven = None
            self._given.callback(setattr, trainer, "accumulate_grad_batches", 1)
            base = base_batch_of(self._settings)
            loaders: Any = LoaderBatchesPerBaseBatch(trainer, base, self._micro_batch)
            trainer.accumulate_grad_batches = loaders  # of estimated_stepping_batches
            self._place = trainer.global_rank, trainer.world_size

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses schedulers and clipping that cannot work, which are known now."""
        trainer.accumulate_grad_batches = 1
        require_scheduler(trainer, pl_module)
        taken_clipping(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the adaptive batch between model and optimizer, and continues where it was saved."""
        meter = self._meter(trainer.model)
        micro = self._micro_batch or loaders_batch(trainer)
        batches = trainer.num_training_batches
        endless = math.isinf(batches) or trainer.fast_dev_run
        samples = None if endless else int(batches) * micro * meter.source.ranks
        self._take_over(trainer, pl_module)
        optimizer = trainer.optimizers[0]
        self.train = AdaptiveBatch(
            trainer.model,
            optimizer,
            ExternalBatches(micro, samples),
            fixed_micro_batch=True,
            scheduler=taken_scheduler(trainer),
            scaler=_scaler(trainer),
            meter=meter,
            **copy_options(self._settings),
        )
        warn_of_end(trainer, self.train)
        self._driven = ExternalLoop(self.train)
        self._given.callback(
            ensure_step_hooks(optimizer).register_step_post_hook(self._leave_update).remove
        )
        self._given.callback(meter.close)
        if self._loaded:
            self.train.load_state_dict(_here(self._loaded))
            self._loaded = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives back to the trainer what was taken over."""
        self._given.close()
        if self._trains:  # hooks lie in cycles; a weak reference of theirs to a sharded parameter
            gc.collect()  # would keep the next training of the module from moving it

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leaves the step, with learning rates as they were."""
        for stack in (self._backward, self._update):
            stack.__exit__(type(exception), exception, exception.__traceback__)
        self._given.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The weights that a schedule-free optimizer has for evaluation."""
        _set_mode(trainer, "eval")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, at last."""
        _set_mode(trainer, "eval")

    # one micro-batch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Says whether this batch is the last of its step, in the trainer's own terms."""
        assert self._driven is not None
        _set_mode(trainer, "train")
        samples = self._count(batch)
        if samples < 1:
            raise BatchError(f"a batch has {samples} samples; leave empty ones out in the loader")
        number, ends = batch_idx + 1, bool(trainer.is_last_batch)
        batches = trainer.num_training_batches
        left = None if math.isinf(batches) else int(batches) - number
        self._driven.announce(samples, ends_epoch=ends, remaining=0 if ends else left)
        # Lightning steps where its batch's number is a multiple of this, and divides the loss by it
        trainer.accumulate_grad_batches = number if self._step.last else number + 1

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Makes the loss this micro-batch's share of the step's mean loss."""
        divisor, scaler = trainer.accumulate_grad_batches, _scaler(trainer)
        mean = loss.detach() * divisor
        if scaler is not None:
            mean = mean / scaler.scale(torch.ones_like(mean))
        factor = self._backward.enter_context(self._step.weighted_backward(mean))
        loss.mul_(divisor * factor)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The micro-batch was counted."""
        self._backward.close()

    # one update

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Decides, and puts the learning rate of the batch in force, for `optimizer.step()`."""
        step, scaler = self._step, _scaler(trainer)
        if not step.complete:
            raise LoopError(_NO_LOSS)
        if self._clip is not None:
            step.clip_grad_norm_(self._clip)
        finite = self._update.enter_context(step.optimizer_step())
        if not finite:
            if scaler is not None:
                with suppress(RuntimeError):  # unscaled already
                    scaler.unscale_(optimizer)
            self._update.close()  # which empties the gradients, so that nothing is done with them

    def _leave_update(self, *_: Any) -> None:
        """After the optimizer's step, and before Lightning advances any scheduler."""
        self._update.close()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the step, if one has ended here."""
        assert self.train is not None
        assert self._driven is not None
        step = self._step
        if step.waiting:
            raise LoopError(_NO_LOSS)
        if step.complete and not step.ended:
            raise LoopError(_NO_STEP)
        if step.ended:
            self._driven.end_pass()
            assert self.train.record is not None
            self._log.append(trainer, self.train.record)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses an epoch that was left with a batch in hand."""
        if self._step.waiting:
            raise LoopError(_LEFT)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The loop's; a step that has begun is not in it, as its gradients are in no checkpoint."""
        return self.train.state_dict() if self.train is not None else self._loaded or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until there is an optimizer; random states come before the loader."""
        if not self._trains:
            return
        self._loaded = state_dict
        if state_dict and (state_dict["own"]["rank"], state_dict["own"]["ranks"]) == self._place:
            restore_random_state(state_dict["own"]["random"])

    # what is known

    @property
    def _step(self) -> Step:
        assert self._driven is not None
        return self._driven.step

    def _take_over(self, trainer: Trainer, module: LightningModule) -> None:
        """What the trainer does by itself, until the end of the training."""
        self._clip = taken_clipping(trainer, module)
        if self._clip is not None:
            self._given.callback(setattr, trainer, "gradient_clip_val", trainer.gradient_clip_val)
            trainer.gradient_clip_val = None


def _scaler(trainer: Trainer) -> GradScaler | None:
    """Of the precision plugin, where float16 has one."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler


def _set_mode(trainer: Trainer, mode: str) -> None:
    """Of optimizers that train other weights than those to evaluate with, as schedule-free ones."""
    for optimizer in trainer.optimizers:
        if callable(set_mode := getattr(optimizer, mode, None)):
            set_mode()


def _here(state: dict[str, Any]) -> dict[str, Any]:
    """A state to load now that the loader has begun its epoch, which drew random numbers.

    In the middle of an epoch they were drawn before the state was saved, else afterwards.
    """
    if state["shared"]["pass"].get("open", True):
        return state
    return {**state, "own": {**state["own"], "random": random_state()}}
