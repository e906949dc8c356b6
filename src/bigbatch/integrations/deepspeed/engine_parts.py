"""What an AdaptiveBatch gets of a DeepSpeed engine: the meter and the scheduler."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bigbatch.integrations.deepspeed.config_checks import require_supported
from bigbatch.integrations.deepspeed.gradient_source import ZeroSource
from bigbatch.integrations.deepspeed.vr_optimizer import (
    bind_to_zero,
    require_base_optimizer,
    require_vr_layout,
    set_layers,
)
from bigbatch.integrations.deepspeed.zero_layout import layout_of
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.statistics.meter import GradientMeter


def engine_meter(
    engine: Any, optimizer: Any, make: Callable[..., GradientMeter] = GradientMeter
) -> GradientMeter:
    """The meter of an engine, which also runs its backwards and steps.

    Args:
        engine: the engine.
        optimizer: its own optimizer, or a variance-reduced one around that.
        make: makes the meter, of the engine and source=.
    Raises:
        SettingError: a setting of DeepSpeed is not supported; docs/deepspeed.md.
    """
    require_supported(engine)
    require_base_optimizer(engine)
    layout = layout_of(engine)
    source = ZeroSource(engine, layout)
    set_layers(engine.basic_optimizer, layout)
    if (vr_optimizer := micro_batch_optimizer(optimizer)) is not None:
        vr_layout = require_vr_layout(engine, vr_optimizer, layout)
        bind_to_zero(vr_optimizer, source, vr_layout)
    return make(engine, source=source)


def engine_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler | None:
    """A scheduler of an engine, torch's or DeepSpeed's own, as AdaptiveBatch advances it."""
    if scheduler is None or isinstance(scheduler, LRScheduler):
        return scheduler
    return DeepSpeedScheduler(scheduler, optimizer)


class DeepSpeedScheduler(LRScheduler):
    """Counts steps as WarmupLR and DeepSpeed's other schedulers do."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self._scheduler, self.optimizer = scheduler, optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Steps so far."""
        return int(self._scheduler.last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Advances the scheduler by one step."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of DeepSpeed's scheduler."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of DeepSpeed's scheduler."""
        self._scheduler.load_state_dict(state_dict)
