"""A Lightning callback that changes the batch size at every step: `Trainer(callbacks=[...])`."""

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import BatchError, LoopError, SettingError
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.integrations.lightning.accumulation import (
    LoaderBatchesPerBaseBatch,
    base_batch_of,
    keep_accumulation,
)
from bigbatch.integrations.lightning.lightning_checks import (
    clip_norm_of,
    loader_batch_size,
    require_data_parallel,
    require_drivable,
    require_scheduler,
    take_over_scheduler,
    warn_of_end,
)
from bigbatch.log.step_record import StepRecord
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy, require_policy
from bigbatch.setting_types import checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions, copy_options
from bigbatch.training.step import Step

_NO_LOSS = (
    "training_step returned no loss for a batch, so the step lacks a micro-batch; return a loss "
    "times 0 instead, or leave the batch out in the loader if it should not count"
)


class AdaptiveBatchCallback(Callback):
    """Adapts the batch size inside a `Trainer`, as one more callback of an unchanged script.

        Trainer(callbacks=[AdaptiveBatchCallback(SimiGrad(target=0.3, max_batch=8192))])

    One batch of the training loader on one rank is a micro-batch, and the accumulation changes from
    step to step: the batch size is a multiple of ranks x the loader's batch size. It supports one
    device, DDP, FSDP2 (`ModelParallelStrategy`) and DeepSpeed. `AdaptiveBatch` documents the
    keywords.

    `train` is the AdaptiveBatch from the start of the training, `train.record` its last step.

    Args:
        policy: decides the batch size after every step; or a `Controller`.
        options: batch_size, base_batch, min_micro_batches, lr_scaling, transport, groups, every,
            log as for `AdaptiveBatch`; micro_batch: samples in a batch of the loader, if the loader
            has no batch size. A scheduler with interval="step" is advanced once per base batch.
        meter: function that makes the meter of the model that the strategy has wrapped, such as
            `functools.partial(GradientMeter, confidence=0.9)`; on DeepSpeed it gets source= too.
        count: function that counts the samples in a batch; default: Lightning's, of `self.log`.
        weight: function of a batch, called after its `training_step`, that returns the number of
            elements that its mean loss is over, as `weight` of `Step.backward`; default: what the
            graph of a mean cross entropy says, else its samples.
    Raises:
        SettingError: at the start of `fit`, settings cannot be combined; with the remedy.
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
        weight: Callable[[Batch], float | Tensor] | None = None,
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
        self._weight = weight
        self._batch: Batch = None  # the present one, until it is weighted
        self._accumulation: Any = None  # of the trainer
        self._loop: ExternalLoop | None = None
        self._checkpoint: dict[str, Any] | None = None  # a state to load, until there is a loop
        self._saved_loaders = 0  # loaders whose position the checkpoint has
        self._backward, self._update = ExitStack(), ExitStack()  # entered while Lightning runs them
        self._teardown = ExitStack()  # restores the trainer
        self._trains = True  # False while the trainer tests or predicts, and loads states too
        self._ranks = (0, 1)  # this rank and the number of ranks
        self._clip_norm: float | None = None
        self._logger = StepLogger()
        self._scores: set[str] = set()  # names of metrics that a validation logs
        self._other_metrics: set[str] = set()

    # setup and teardown

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses settings that are not supported, before anything is started."""
        self._trains = stage == "fit"
        if self._trains:
            require_drivable(trainer, pl_module)
            self.train = self._loop = None
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                from bigbatch.integrations.deepspeed.config_checks import require_no_options

                require_no_options(self._settings)
                keep_accumulation(trainer.strategy)
            self._teardown.callback(setattr, trainer, "accumulate_grad_batches", 1)
            base_batch = base_batch_of(self._settings)
            accumulation = LoaderBatchesPerBaseBatch(trainer, base_batch, self._micro_batch)
            trainer.accumulate_grad_batches = self._accumulation = accumulation
            self._ranks = trainer.global_rank, trainer.world_size

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses schedulers and clipping that are not supported, which exist from here on."""
        require_scheduler(trainer, pl_module)
        clip_norm_of(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the AdaptiveBatch of model and optimizer, and loads the state of a checkpoint."""
        optimizer, scheduler = trainer.optimizers[0], take_over_scheduler(trainer)
        engine = trainer.model if isinstance(trainer.strategy, DeepSpeedStrategy) else None
        if engine is None:
            meter = self._meter(trainer.model)
            require_data_parallel(meter)
        else:
            from bigbatch.integrations.deepspeed.engine_parts import engine_meter, engine_scheduler
            from bigbatch.integrations.deepspeed.loop_engine import LoopEngine

            optimizer = engine.basic_optimizer
            meter = engine_meter(engine, optimizer, self._meter)
            scheduler = engine_scheduler(scheduler, optimizer)
        micro_batch = self._micro_batch or loader_batch_size(trainer)
        batches = trainer.num_training_batches
        is_short = trainer.fast_dev_run or trainer.overfit_batches  # maybe shorter than a step
        is_known = not (is_short or math.isinf(batches))
        samples = int(batches) * micro_batch * meter.source.ranks if is_known else None
        self._clip_norm = clip_norm_of(trainer, pl_module)
        if self._clip_norm is not None:
            self._teardown.callback(
                setattr, trainer, "gradient_clip_val", trainer.gradient_clip_val
            )
            trainer.gradient_clip_val = None
        self.train = AdaptiveBatch(
            trainer.model,
            optimizer,
            ExternalBatches(micro_batch, samples),
            fixed_micro_batch=True,
            scheduler=scheduler,
            scaler=_scaler(trainer),
            meter=meter,
            **copy_options(self._settings),
        )
        warn_of_end(trainer, self.train)
        self._loop = ExternalLoop(self.train)
        if engine is not None:
            LoopEngine.adapt(engine, self._loop)
            self._teardown.callback(engine.restore)
        # after the optimizer's step, and before Lightning advances any scheduler
        hook = optimizer.register_step_post_hook(lambda *_: self._update.close())
        self._teardown.callback(hook.remove)
        self._teardown.callback(meter.close)
        self._restore_loader(trainer)
        if self._checkpoint:
            self.train.load_state_dict(self._checkpoint)
            self._checkpoint = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the settings of the trainer, and removes all hooks."""
        self._teardown.close()
        if self._trains:  # hooks are in cycles; their weak references to sharded parameters would
            gc.collect()  # prevent the next training from moving the module

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the step, and restores the learning rates of the schedule."""
        for stack in (self._backward, self._update):
            stack.__exit__(type(exception), exception, exception.__traceback__)
        self._batch = None
        self._teardown.close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts schedule-free optimizers into their evaluation mode."""
        _set_mode(trainer, "eval")
        self._other_metrics |= trainer.callback_metrics.keys() - self._scores

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the metrics of the validation to the log of the training."""
        metrics = trainer.callback_metrics
        self._scores = metrics.keys() - self._other_metrics
        train = self.train if self._trains else None
        if train is not None and train.run_log is not None and train.record is not None:
            train.log(**{name: metrics[name] for name in metrics if name in self._scores})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts schedule-free optimizers into their evaluation mode."""
        _set_mode(trainer, "eval")

    # one micro-batch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Announces the batch, and makes the trainer step after the last batch of a step."""
        assert self._loop is not None
        _set_mode(trainer, "train")
        samples = self._count(batch)
        self._batch = batch
        if samples < 1:
            raise BatchError(f"a batch has {samples} samples; leave empty ones out in the loader")
        number, is_last = batch_idx + 1, bool(trainer.is_last_batch)
        batches = trainer.num_training_batches
        remaining = None if math.isinf(batches) else int(batches) - number
        self._loop.announce(samples, ends_epoch=is_last, remaining=0 if is_last else remaining)
        self._accumulation.set_step(number, ends=self._step.last)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Scales the loss to this micro-batch's share of the step's mean loss."""
        divisor, scaler = trainer.accumulate_grad_batches, _scaler(trainer)
        mean = loss.detach() * divisor
        if scaler is not None:
            mean = mean / scaler.scale(torch.ones_like(mean))
        weight = None if self._weight is None else self._weight(self._batch)
        self._batch = None
        factor = self._backward.enter_context(self._step.weighted_backward(mean, weight, root=loss))
        loss.mul_(divisor * factor)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the micro-batch."""
        self._backward.close()

    # one update

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Decides, and sets the learning rates of the batch for `optimizer.step()`."""
        step, scaler = self._step, _scaler(trainer)
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            return  # the engine does it all
        if not step.complete:
            raise LoopError(_NO_LOSS)
        if self._clip_norm is not None:
            step.clip_grad_norm_(self._clip_norm)
        finite = self._update.enter_context(step.optimizer_step())
        if not finite:
            if scaler is not None:
                with suppress(RuntimeError):  # if it is unscaled already
                    scaler.unscale_(optimizer)
            self._update.close()  # zeroes the gradients, so that the optimizer changes nothing

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Logs the step, if the batch was its last."""
        assert self.train is not None
        assert self._loop is not None
        step = self._step
        if step.waiting:
            raise LoopError(_NO_LOSS)
        if step.complete and not step.ended:
            raise LoopError(
                "the optimizer's step() was not called where Lightning does; leave "
                "optimizer_step() of the module as it is, or let it call "
                "optimizer.step(closure=closure) every time"
            )
        if step.ended:
            self._loop.end_pass()
            self._logger.append(trainer, self.train)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses an epoch that ends before the backward of a batch."""
        assert self._loop is not None
        if self._loop.waiting:
            raise LoopError(
                "on_train_batch_start() returned -1, which ends an epoch within a step; leave "
                "batches out in the loader, or use Trainer(limit_train_batches=)"
            )

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state of the AdaptiveBatch, without a begun step, whose gradients are not saved."""
        return self.train.state_dict() if self.train is not None else self._checkpoint or {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Counts the loaders whose position the checkpoint has."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        self._saved_loaders = len(loop.get("combined_loader", []))

    @loads_state
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until there is an optimizer; restores random states before the loader."""
        if self._trains:
            self._checkpoint = state_dict
            self._restore_random_state(state_dict)

    def _restore_random_state(self, state: dict[str, Any]) -> None:
        if state and (state["own"]["rank"], state["own"]["ranks"]) == self._ranks:
            restore_random_state(state["own"]["random"])

    def _restore_loader(self, trainer: Trainer) -> None:
        """Restores the loader's position where Lightning does not, or warns that it is lost.

        Lightning restores it within an epoch, as it makes the loader. That is too early if
        `configure_optimizers` reads `estimated_stepping_batches`: the states of the loops are
        loaded later.
        """
        loop, state = trainer.fit_loop, self._checkpoint
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        if loop._combined_loader_states_to_load and (loop.restarting or state):
            loader._load_state_dicts(loop._combined_loader_states_to_load)
            loop._combined_loader_states_to_load = []
            iter(fetcher)
        if not state:
            return
        if state["shared"]["pass"].get("open", True):
            if self._saved_loaders < len(loader.flattened) and trainer.is_global_zero:
                warnings.warn(
                    f"the checkpoint is from within an epoch, after {loop.batch_idx + 1} batches, "
                    "and has no position of the loader, so samples of this epoch come twice and "
                    "others never; train with torchdata's StatefulDataLoader, or resume from a "
                    "checkpoint of an epoch's end",
                    stacklevel=2,
                )
            return
        if self._saved_loaders:
            next(fetcher, None)  # a loader at the end of its epoch may not have drawn its order
        if loop.epoch_loop.restarted_on_last:
            return  # Lightning begins the next epoch
        if self._saved_loaders:
            self._restore_random_state(state)
            iter(fetcher)
        self._checkpoint = {**state, "own": {**state["own"], "random": random_state()}}

    @property
    def _step(self) -> Step:
        assert self._loop is not None
        return self._loop.step


def _scaler(trainer: Trainer) -> GradScaler | None:
    """The GradScaler of the precision plugin, which float16 has."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler


def _set_mode(trainer: Trainer, mode: str) -> None:
    """Calls `train` or `eval` of optimizers that have other weights for it: schedule-free ones."""
    for optimizer in trainer.optimizers:
        if callable(set_mode := getattr(optimizer, mode, None)):
            set_mode()


class StepLogger:
    """Writes records as Lightning writes metrics: to its loggers, every n steps.

    A logger that fails gets no more records, with one warning; training continues.
    """

    def __init__(self) -> None:
        self._failed: list[Any] = []
        self._measured: StepRecord | None = None  # the last measurement that was written

    def append(self, trainer: Any, train: AdaptiveBatch) -> None:
        """Writes the record of a step, if it is one of the n-th."""
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or trainer.global_step % every:
            return
        metrics = self._metrics(train)
        for logger in trainer.loggers:
            if any(logger is failed for failed in self._failed):
                continue
            try:  # numbered from 0, as Lightning's own metrics
                logger.log_metrics(metrics, step=trainer.global_step - 1)
            except Exception as error:
                self._failed.append(logger)
                warnings.warn(
                    f"{type(logger).__name__} could not log batch size and noise "
                    f"({type(error).__name__}: {error}); training continues without that",
                    stacklevel=2,
                )

    def _metrics(self, train: AdaptiveBatch) -> dict[str, float]:
        """Of the last step, and of a measurement since the last write; without those not finite."""
        record, measured = train.record, train.last_measured
        assert record is not None
        metrics = {"batch_size": float(record.batch_size), "loss": record.loss}
        if measured is not None and measured is not self._measured:
            metrics |= {"similarity": measured.similarity, "noise_scale": measured.noise_scale}
        self._measured = measured
        for group, lr in enumerate(record.lr):
            metrics[f"lr/{group}" if group else "lr"] = lr
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return {f"bigbatch/{name}": value for name, value in finite.items()}
