"""DeepSpeed's own schedulers, as ones that are advanced in base batches."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def advanceable(scheduler: Any, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler, as torch's are."""
    if scheduler is None or isinstance(scheduler, LRScheduler):
        return scheduler
    return DeepSpeedScheduler(scheduler, optimizer)


class DeepSpeedScheduler(LRScheduler):
    """One that counts as DeepSpeed's WarmupLR and its like do."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self._scheduler, self.optimizer = scheduler, optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Ticks so far."""
        count: int = self._scheduler.last_batch_iteration
        return count

    def step(self, epoch: int | None = None) -> None:
        """One tick."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Its own."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Its own."""
        self._scheduler.load_state_dict(state_dict)
