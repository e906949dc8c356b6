"""DeepSpeed's engine in Lightning's loop, which calls it in every micro-batch."""

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.gradients.protocols import Engine
from bigbatch.integrations.deepspeed.config_checks import require_no_options
from bigbatch.integrations.deepspeed.engine_parts import engine_meter, engine_scheduler
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.statistics.meter import GradientMeter


class LightningEngine(DeepSpeedEngine):
    """An engine whose `backward` and `step` are those of the current step of a loop.

    `adapt` makes it of an engine in place, `restore` makes it DeepSpeed's own again.
    """

    _steps: Engine
    _loop: ExternalLoop

    @classmethod
    def adapt(cls, engine: DeepSpeedEngine, loop: ExternalLoop) -> None:
        """Specialises an engine in place."""
        engine.__class__ = cls
        engine._steps, engine._loop = loop.train.meter.source.engine, loop

    def restore(self) -> None:
        """Makes the engine DeepSpeed's own again."""
        del self._steps, self._loop
        self.__class__ = DeepSpeedEngine

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward of a loss that the callback has weighted."""
        self._steps.backward(loss)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Steps the optimizer if the micro-batch was the last of its step."""
        step = self._loop.step
        if step.complete:
            with step.optimizer_step() as finite:
                step.step_optimizer(finite)


def keep_accumulation(strategy: DeepSpeedStrategy, options: Mapping[str, Any]) -> None:
    """Has DeepSpeed read the accumulation, 1, before the trainer's number is for schedules alone.

    The micro-batch, of which DeepSpeed only computes samples per second, needs no loader then.

    Raises:
        SettingError: an option of AdaptiveBatch does not work on DeepSpeed.
    """
    require_no_options(options)
    assert isinstance(strategy.config, dict)
    strategy.config.setdefault("train_micro_batch_size_per_gpu", 1)
    strategy._init_config_if_needed()


def parts_of_engine(
    engine: Any, scheduler: Any, make_meter: Callable[..., GradientMeter]
) -> tuple[Optimizer, LRScheduler | None, GradientMeter]:
    """(optimizer, scheduler, meter) for AdaptiveBatch; the meter is made with source= too."""
    optimizer: Optimizer = engine.basic_optimizer
    meter = engine_meter(engine, optimizer, make_meter)
    return optimizer, engine_scheduler(scheduler, optimizer), meter
