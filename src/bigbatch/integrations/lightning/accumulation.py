"""Loader batches per base batch, from which Lightning computes the steps of a schedule."""

from functools import cached_property, total_ordering
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from bigbatch.integrations.lightning.lightning_checks import loader_batch_size
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import needs_of


@total_ordering
class LoaderBatchesPerBaseBatch:
    """Number that is `trainer.accumulate_grad_batches` during a training.

        base batch / (ranks x batch size of the training loader)

    So `trainer.estimated_stepping_batches`, which divides by it, counts base batches of samples, as
    the scheduler does. It is computed when it is used, as the loader may not exist before. Only its
    remainder is another number's: Lightning steps after a batch whose number is a multiple of it.

    Args:
        trainer: the trainer that has the loader.
        base_batch: samples between two steps of the scheduler; None for one batch of the loader on
            every rank.
        micro_batch: samples in a batch of the loader, if the loader has no batch size.
    """

    def __init__(self, trainer: Trainer, base_batch: int | None, micro_batch: int | None) -> None:
        self._trainer, self._base_batch, self._micro_batch = trainer, base_batch, micro_batch
        self._period = 1

    def set_step(self, number: int, *, ends: bool) -> None:
        """Says whether a step ends with the batch of this number in the epoch, from 1."""
        self._period = number if ends else number + 1

    def __rmod__(self, number: int) -> int:
        return number % self._period

    @cached_property
    def value(self) -> float:
        """The quotient; an int if it is a whole number, as a scheduler's total must be."""
        if self._base_batch is None:
            return 1
        self._trainer.fit_loop.setup_data()  # does nothing if the loader is set up
        size = self._micro_batch or loader_batch_size(self._trainer)
        quotient = self._base_batch / (self._trainer.world_size * size)
        return int(quotient) if quotient.is_integer() else quotient

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


def keep_accumulation(strategy: DeepSpeedStrategy) -> None:
    """Has DeepSpeed read the accumulation, 1, before `LoaderBatchesPerBaseBatch` takes its place.

    The micro-batch, of which DeepSpeed only computes samples per second, needs no loader then.
    """
    assert isinstance(strategy.config, dict)
    strategy.config.setdefault("train_micro_batch_size_per_gpu", 1)
    strategy._init_config_if_needed()


def base_batch_of(settings: dict[str, Any]) -> int | None:
    """The base batch of the settings; None where it is one batch of the loader on every rank."""
    policy = settings["policy"]
    if isinstance(policy, Controller):
        return policy.base_batch
    base_batch: int | None = settings.get("base_batch") or settings.get("batch_size")
    return base_batch or needs_of(policy).batch_size
