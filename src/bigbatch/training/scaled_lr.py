"""A factor of the learning rate that is in force during a step."""

import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.optimizer_settings import rates_of

_LR = operator.methodcaller("get", "lr")


def scale_lr(optimizer: Optimizer, factor: float) -> AbstractContextManager[list[float]]:
    """Multiplies every group's learning rate inside the block and restores it afterwards.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Gives the rates in force, one per group; nan for a group without one. A tensor stays the same
    tensor, as compiled and captured steps need; one that several groups share is multiplied once.
    A factor of 1 changes nothing, so an optimizer may then set rates inside its `step()`.

    Raises:
        SettingError: a factor or a rate that is not a finite number of at least 0.
        LoopError: at the block's end, if a rate was set inside it; the old ones are restored.
    """
    factor = float(factor)
    if not 0 <= factor < math.inf:
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    return nullcontext(rates_of(optimizer)) if factor == 1 else _scaled(optimizer, factor)


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[list[float]]:
    groups = [*optimizer.param_groups]
    saved: list[Any] = [*map(_LR, groups)]
    for number, lr in enumerate(saved):
        if lr is None:
            raise SettingError(
                f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                "lr_scaling=None"
            )
    tensors = {lr: lr.detach().clone() for lr in saved if isinstance(lr, Tensor)}
    rates_of(optimizer)  # raises an error for what is no rate
    try:
        for tensor in tensors:
            tensor.detach().mul_(factor)
        for group, lr in zip(groups, saved, strict=True):
            if not isinstance(lr, Tensor):
                group["lr"] = lr * factor
        rates = rates_of(optimizer)
        scaled = RateSnapshot(groups)
        yield rates
        for number, _, lr in scaled.changes():
            other = lr.item() if isinstance(lr, Tensor) else lr
            if other != rates[number]:
                raise LoopError(
                    f"the learning rate of parameter group {number} was set to {other} during the "
                    f"step, where AdaptiveBatch had set {rates[number]}; set it between the steps, "
                    "or pass lr_scaling=None"
                )
    finally:
        for group, lr in zip(groups, saved, strict=True):
            group["lr"] = lr
        for tensor, value in tensors.items():
            tensor.detach().copy_(value)


class RateSnapshot:
    """The learning rates of some parameter groups at one time."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.groups = [*groups]
        self._rates: list[Any] = [*map(_LR, self.groups)]
        self._writes = [*map(_times_written, self._rates)]

    def changes(self) -> list[tuple[int, Any, Any]]:
        """(index of the group, rate then, rate now) where it was set or written to since.

        Nothing is read from a device: of a tensor, the writes that autograd has seen are compared.
        """
        rates = [*map(_LR, self.groups)]
        writes = [*map(_times_written, rates)]
        if [*map(id, rates)] == [*map(id, self._rates)] and writes == self._writes:
            return []
        rows = enumerate(zip(self._rates, rates, self._writes, writes, strict=True))
        return [(n, old, new) for n, (old, new, w, now) in rows if new is not old or w != now]


def _times_written(lr: float | Tensor | None) -> int:
    return lr._version if isinstance(lr, Tensor) else 0
