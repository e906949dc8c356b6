"""What Lightning divides by to say how many steps a schedule has: loader batches a base batch."""

from functools import total_ordering
from typing import Any

from lightning.pytorch import Trainer

from bigbatch.integrations.lightning.lightning_checks import loaders_batch
from bigbatch.policies.controller import Controller


@total_ordering
class LoaderBatchesPerBaseBatch:
    """`trainer.accumulate_grad_batches` as a module's `configure_optimizers` sees it.

        base batch / (ranks x batch size of the training loader)

    So `trainer.estimated_stepping_batches`, which divides by it, counts base batches of samples, as
    the scheduler is advanced. A number that is worked out when it is asked for: the loader may not
    be there before.

    Args:
        trainer: whose loader it is.
        base_batch: samples between two steps of the scheduler; None for one batch of the loader on
            every rank.
        micro_batch: samples in a batch of the loader, where it does not say that itself.
    """

    def __init__(self, trainer: Trainer, base_batch: int | None, micro_batch: int | None) -> None:
        self._trainer, self._base_batch, self._micro_batch = trainer, base_batch, micro_batch

    @property
    def value(self) -> float:
        """An int where it is whole: a scheduler's total wants one."""
        if self._base_batch is None:
            return 1
        self._trainer.fit_loop.setup_data()  # nothing, where it is set up
        size = self._micro_batch or loaders_batch(self._trainer)
        number = self._base_batch / (self._trainer.world_size * size)
        return int(number) if number.is_integer() else number

    def __rtruediv__(self, other: float) -> float:
        return other / self.value

    def __rfloordiv__(self, other: float) -> float:
        return other // self.value

    def __mul__(self, other: float) -> float:
        return self.value * other

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __lt__(self, other: float) -> bool:
        return self.value < other

    def __hash__(self) -> int:
        return id(self)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)


def base_batch_of(settings: dict[str, Any]) -> int | None:
    """The base batch by settings alone; None where it is one batch of the loader on every rank."""
    policy = settings["policy"]
    if isinstance(policy, Controller):
        return policy.base_batch
    given: int | None = settings.get("base_batch") or settings.get("batch_size")
    return given or getattr(policy, "batch_size", None)
