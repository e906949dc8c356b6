"""Settings of a Lightning trainer that are refused, warned of, or taken over."""

import sys
import warnings
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.errors import SettingError
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.scheduler import last_tick

_NEVER = sys.maxsize


def require_drivable(trainer: Trainer, module: LightningModule) -> None:
    """Raises SettingError, before the set-up, if a callback cannot change the accumulation."""
    if not module.automatic_optimization:
        raise SettingError(
            f"{type(module).__name__} has automatic_optimization=False, and its own loop steps the "
            "optimizer; set it to True, or use bigbatch.AdaptiveBatch in that loop"
        )
    require_strategy(trainer.strategy)
    if trainer.accumulate_grad_batches != 1:
        raise SettingError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is set along with "
            "AdaptiveBatchCallback, which changes it; leave it out, and pass the initial size as "
            "AdaptiveBatchCallback(batch_size=)"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            raise SettingError(
                f"{type(callback).__name__} sets accumulate_grad_batches too; leave it out, or "
                "AdaptiveBatchCallback (a schedule of batch sizes is policy=Schedule(...))"
            )


def require_strategy(strategy: Any) -> None:
    """Raises SettingError if gradients cannot be measured under a strategy."""
    if isinstance(strategy, FSDPStrategy):
        raise SettingError(
            "FSDPStrategy wraps by FullyShardedDataParallel (FSDP1), which flattens parameters; "
            "use ModelParallelStrategy, and fully_shard (FSDP2) in configure_model()"
        )
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise SettingError(
            f"{type(strategy).__name__} is not supported; use one device, DDPStrategy, "
            "ModelParallelStrategy with fully_shard, or DeepSpeedStrategy"
        )


def require_data_parallel(meter: GradientMeter) -> None:
    """Raises SettingError for a model that configure_model() has cut by parallelize_module."""
    if meter.source.processes > meter.source.ranks:
        raise SettingError(
            "configure_model() cuts the model by tensor parallelism (parallelize_module), which "
            "AdaptiveBatchCallback does not support; use ModelParallelStrategy with "
            "tensor_parallel_size=1, or bigbatch.AdaptiveBatch in a loop of your own"
        )


def require_scheduler(trainer: Trainer, module: LightningModule) -> None:
    """Raises SettingError unless the scheduler that counts steps can count base batches."""
    configs = _step_configs(trainer)
    if len(configs) > 1:
        raise SettingError(
            f'{len(configs)} schedulers have interval="step"; join them by '
            'torch.optim.lr_scheduler.ChainedScheduler, or give them interval="epoch"'
        )
    for config in configs:
        name = type(config.scheduler).__name__
        if config.reduce_on_plateau:
            raise SettingError(
                f'{name} has interval="step" and counts steps, whose batch size changes; give it '
                'interval="epoch"'
            )
        if config.frequency != 1:
            raise SettingError(
                f"{name} has frequency={config.frequency} steps, and is advanced once per base "
                "batch; pass AdaptiveBatchCallback(base_batch=) and frequency=1"
            )
        if is_overridden("lr_scheduler_step", module):
            raise SettingError(
                f"lr_scheduler_step() is overridden, and {name} is advanced in base batches "
                'without it; remove it, or give the scheduler interval="epoch"'
            )


def take_over_scheduler(trainer: Trainer) -> LRScheduler | None:
    """The scheduler that counts steps, if any; Lightning saves and logs it, but never steps it."""
    for config in _step_configs(trainer):
        config.frequency = _NEVER
        scheduler: LRScheduler = config.scheduler
        return scheduler
    return None


def warn_of_end(trainer: Trainer, train: AdaptiveBatch) -> None:
    """Warns if the schedule and the training end at different places, as far as both are known."""
    scheduler = train.scheduler
    total = last_tick(scheduler) if isinstance(scheduler, LRScheduler) else None
    if total is None or not trainer.is_global_zero:
        return
    name, base = type(scheduler).__name__, f"{train.scheduler_batch:g}"
    if trainer.max_steps != -1 and not isinstance(train.controller.policy, Fixed):
        warnings.warn(
            f"max_steps={trainer.max_steps} ends the training after so many updates, and {name} "
            f"ends after {total} base batches of {base} samples, which a growing batch uses up "
            "earlier; max_epochs ends both together",
            stacklevel=2,
        )
    epochs = trainer.max_epochs
    if trainer.max_steps != -1 or epochs in (None, -1) or train.batches.samples is None:
        return
    steps = train.base_steps(epochs)
    if abs(steps - total) > epochs + 1 + total / 100:  # Lightning rounds every epoch up
        warnings.warn(
            f"{name} reaches its end in {total} steps, and max_epochs={epochs} advances it {steps} "
            f"times, once for every base batch of {base} samples; build it in configure_optimizers "
            "with trainer.estimated_stepping_batches, which counts these, or pass "
            "AdaptiveBatchCallback(base_batch=)",
            stacklevel=2,
        )


def clip_norm_of(trainer: Trainer, module: LightningModule) -> float | None:
    """The norm that the callback clips by, for a variance-reduced optimizer; else None.

    Lightning must not clip there: under DDP `.grad` is not the gradient, and no one else may write
    to it.
    """
    if micro_batch_optimizer(trainer.optimizers[0]) is None:
        return None
    if is_overridden("configure_gradient_clipping", module):
        raise SettingError(
            "configure_gradient_clipping() is overridden, and .grad of a variance-reduced "
            "optimizer is not the gradient under DDP; use Trainer(gradient_clip_val=), or another "
            "optimizer"
        )
    max_norm = trainer.gradient_clip_val
    if max_norm and trainer.gradient_clip_algorithm == "value":
        raise SettingError(
            'gradient_clip_algorithm="value" would clip r g under a variance-reduced optimizer; '
            'use gradient_clip_algorithm="norm"'
        )
    return float(max_norm) if max_norm else None


def loader_batch_size(trainer: Trainer) -> int:
    """Samples in a batch of the training loader; raises SettingError if it does not say."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        raise SettingError(
            f"{type(loader).__name__} has no batch_size; pass AdaptiveBatchCallback(micro_batch=)"
        )
    return size


def _step_configs(trainer: Trainer) -> list[Any]:
    return [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
