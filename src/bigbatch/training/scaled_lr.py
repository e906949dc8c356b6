"""A factor of the learning rate that is in force during a step."""

import math
import operator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.learning_rates import RATE, rates_of

lr_of = operator.methodcaller("get", "lr")
"""The learning rate of a parameter group; None for one without."""


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
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    return nullcontext(rates_of(optimizer)) if factor == 1 else _ScaledRates(optimizer, factor)


class _ScaledRates:
    """The learning rates times a factor, from entering on until leaving."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._groups = [*optimizer.param_groups]
        self._saved = [*map(lr_of, self._groups)]
        for number, lr in enumerate(self._saved):
            if lr is None:
                raise SettingError(
                    f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                    "lr_scaling=None"
                )
        self._tensors = {lr: lr.detach().clone() for lr in self._saved if isinstance(lr, Tensor)}

    def __enter__(self) -> list[float]:
        try:
            for tensor in self._tensors:
                tensor.detach().mul_(self._factor)
            for group, lr in zip(self._groups, self._saved, strict=True):
                if lr in RATE:
                    group["lr"] = lr * self._factor
            self._rates = rates_of(self._optimizer)
        except BaseException:
            self._restore()
            raise
        self._scaled = [*map(lr_of, self._groups)]
        self._writes = [*map(times_written, self._scaled)]
        return self._rates

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._require_unchanged()
        finally:
            self._restore()

    def _restore(self) -> None:
        for group, lr in zip(self._groups, self._saved, strict=True):
            group["lr"] = lr
        for tensor, value in self._tensors.items():
            tensor.detach().copy_(value)

    def _require_unchanged(self) -> None:
        """Compares values only after a write, as reading them from a GPU would wait."""
        present = [*map(lr_of, self._groups)]
        rows = zip(present, self._scaled, self._writes, self._rates, strict=True)
        for number, (now, lr, writes, rate) in enumerate(rows):
            if now is lr and times_written(lr) == writes:
                continue
            if (other := now.item() if isinstance(now, Tensor) else now) != rate:
                raise LoopError(
                    f"the learning rate of parameter group {number} was set to {other} during the "
                    f"step, where AdaptiveBatch had set {rate}; set it between the steps, or pass "
                    "lr_scaling=None"
                )


def times_written(lr: float | Tensor | None) -> int:
    """Number of in-place writes to a rate that autograd has seen; 0 for a number."""
    return lr._version if isinstance(lr, Tensor) else 0
