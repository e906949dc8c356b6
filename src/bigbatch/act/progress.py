"""Learning-rate schedulers that count base batches of samples instead of optimizer steps."""

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from bigbatch.errors import SettingError


class BaseBatchClock:
    """Advances a step-counting scheduler once for every base batch of samples consumed.

    So a schedule written for the base batch size keeps its shape over the data whatever the batch
    size does. A fraction of a base batch is remembered. A scheduler that has an end stays there.

    Args:
        base_batch: samples per tick.
        optimizer: the one that trains; a scheduler must belong to it.
    """

    def __init__(self, base_batch: int, optimizer: Optimizer) -> None:
        self.base_batch = base_batch
        self._optimizer = optimizer
        self._scheduler: LRScheduler | None = None
        self._samples = 0  # since the last tick
        self._refused = 0  # ticks after the schedule's end
        self._pending: dict[str, Any] | None = None  # state of a scheduler that is still to come

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that is advanced, if any."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler | None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise SettingError(
                "ReduceLROnPlateau needs a metric at every step; call its step(metric) in your own "
                "loop and leave scheduler=None"
            )
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            raise SettingError(f"scheduler={scheduler!r} is no torch LRScheduler")
        if scheduler is not None and scheduler.optimizer is not self._optimizer:
            raise SettingError(
                "the scheduler belongs to another optimizer than the one that trains"
            )
        self._scheduler = scheduler
        if scheduler is not None and self._pending is not None:
            scheduler.load_state_dict(self._pending)
            self._pending = None
            groups = self._optimizer.param_groups  # a scheduler that is built later has reset them
            for group, lr in zip(groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def advance(self, samples: int) -> None:
        """Takes the samples of one optimizer step in and ticks as often as they fill."""
        self._samples += samples
        ticks, self._samples = divmod(self._samples, self.base_batch)
        for _ in range(ticks):
            self._tick()

    def _tick(self) -> None:
        if self._scheduler is None:
            return
        last = _last_tick(self._scheduler)
        if last is None or self._scheduler.last_epoch < last:
            self._scheduler.step()
            return
        self._refused += 1
        if self._refused == 2:  # a schedule of T ticks starts at tick 0, so one is always left over
            warnings.warn(
                f"{type(self._scheduler).__name__} reached its end after {last} base batches and "
                f"stays there; train.base_steps(epochs) gives the total to build it with",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on, the scheduler's own state included."""
        scheduler = self._pending if self._scheduler is None else self._scheduler.state_dict()
        return {"samples": self._samples, "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        self._samples = state["samples"]
        self._pending = state["scheduler"]
        self.scheduler = self._scheduler


def _last_tick(scheduler: LRScheduler) -> int | None:
    """The tick after which the schedule is over; None where torch's own holds or never ends."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps) - 1
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, SequentialLR):
        last = _last_tick(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    return None
