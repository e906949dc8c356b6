"""DeepSpeed's own schedulers, wrapped so that they are advanced in base batches."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def as_torch_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler if it is torch's, else a wrapper that has its interface."""
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
        count: int = self._scheduler.last_batch_iteration
        return count

    def step(self, epoch: int | None = None) -> None:
        """Advances the scheduler by one step."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of DeepSpeed's scheduler."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of DeepSpeed's scheduler."""
        self._scheduler.load_state_dict(state_dict)
