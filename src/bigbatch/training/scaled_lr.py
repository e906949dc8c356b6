"""A factor of the learning rate that is in force during a step."""

import math
import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.learning_rates import rates_of

_LR = operator.methodcaller("get", "lr")


def scale_lr(optimizer: Optimizer, factor: float) -> AbstractContextManager[list[float]]:
    """Multiplies every group's learning rate inside the block and restores it afterwards.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Schedulers never see the factor. A tensor stays the same tensor, as compiled and captured steps
    need; one that several groups share is multiplied once. A factor of 1 changes nothing, so an
    optimizer that sets learning rates inside its `step()` needs `lr_scaling=None`.

    Returns:
        The learning rates in force, one per group; nan for a group without one.
    Raises:
        SettingError: another factor, one for a group without a learning rate, or a learning rate
            that is not a finite number of at least 0.
        LoopError: at the block's end, if a learning rate was set inside it; the old ones are
            restored.
    """
    factor = float(factor)
    if not 0 <= factor < math.inf:
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    return nullcontext(rates_of(optimizer)) if factor == 1 else _ScaledRates(optimizer, factor)


class _ScaledRates:
    """The learning rates times a factor, from entering on until leaving."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._groups = [*optimizer.param_groups]
        self._saved: list[Any] = [*map(_LR, self._groups)]
        for number, lr in enumerate(self._saved):
            if lr is None:
                raise SettingError(
                    f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                    "lr_scaling=None"
                )
        self._tensors = {lr: lr.detach().clone() for lr in self._saved if isinstance(lr, Tensor)}

    def __enter__(self) -> list[float]:
        rates_of(self._optimizer)  # raises an error for what is no rate
        try:
            for tensor in self._tensors:
                tensor.detach().mul_(self._factor)
            for group, lr in zip(self._groups, self._saved, strict=True):
                if not isinstance(lr, Tensor):
                    group["lr"] = lr * self._factor
            rates = rates_of(self._optimizer)
        except BaseException:
            self._restore()
            raise
        self._rates, self._scaled = rates, RateSnapshot(self._groups)
        return rates

    def __exit__(self, kind: object, *_unused: object) -> None:
        try:
            for number, _, lr in self._scaled.changes() if kind is None else ():
                other, rate = lr.item() if isinstance(lr, Tensor) else lr, self._rates[number]
                if other != rate:
                    raise LoopError(
                        f"the learning rate of parameter group {number} was set to {other} during "
                        f"the step, where AdaptiveBatch had set {rate}; set it between the steps, "
                        "or pass lr_scaling=None"
                    )
        finally:
            self._restore()

    def _restore(self) -> None:
        for group, lr in zip(self._groups, self._saved, strict=True):
            group["lr"] = lr
        for tensor, value in self._tensors.items():
            tensor.detach().copy_(value)


class RateSnapshot:
    """The learning rates of some parameter groups at one time.

    Args:
        groups: the groups.
    """

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
