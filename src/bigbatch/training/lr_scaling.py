"""How the learning rate follows the batch size: a factor, applied around the step only."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import LoopError, SettingError
from bigbatch.setting_types import checked
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics

Scaling = Callable[[int, int, GradientStatistics | None], float]
"""(samples of the step, base batch, its noise if it was measured) -> factor."""

LRScaling = Literal["sqrt", "linear", "adascale"] | Scaling | None


def square_root(batch_size: int, base_batch: int, noise: GradientStatistics | None = None) -> float:
    """sqrt(B / B_base), for noise-dominated training and Adam-like optimizers.

    Source:
        SimiGrad's code; Krizhevsky 2014 (arXiv 1404.5997).
    Example:
        >>> square_root(512, 128)
        2.0
    """
    return math.sqrt(batch_size / base_batch)


def linear(batch_size: int, base_batch: int, noise: GradientStatistics | None = None) -> float:
    """B / B_base, the linear scaling rule of SGD.

    Source:
        Goyal et al. 2017 (arXiv 1706.02677).
    Example:
        >>> linear(512, 128)
        4.0
    """
    return batch_size / base_batch


def unscaled(batch_size: int, base_batch: int, noise: GradientStatistics | None = None) -> float:
    """1: the learning rate is left as it is."""
    return 1.0


class AdaScale:
    """AdaScale's gain: between 1 (no noise) and B / B_base (only noise).

    The formula is that of `GradientStatistics.adascale_gain`.

    Signal and noise are averaged over a window of 1000 base batches first; a step without a
    measurement uses the average so far, and 1 before there is one.

    Source:
        Johnson et al. 2020 (arXiv 2007.05105).
    """

    def __init__(self, base_batch: int) -> None:
        self._average = NoiseAverage(1000 * base_batch)

    def __call__(self, batch_size: int, base_batch: int, noise: GradientStatistics | None) -> float:
        """The factor of a step; takes its noise into the averages."""
        if noise is not None:
            self._average.update(noise)
        if math.isnan(self._average.grad_sqnorm):
            return 1.0
        average = GradientStatistics(
            self._average.grad_sqnorm, self._average.grad_variance, batch_size, 0
        )
        return average.adascale_gain(base_batch)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._average.load_state_dict(state)


@checked
def resolve_scaling(lr_scaling: LRScaling, base_batch: int) -> Scaling:
    """The function behind a name.

    Args:
        lr_scaling: "sqrt", "linear", "adascale", None for no scaling, or a function of your own.
        base_batch: batch size that the learning rate was tuned for.
    Raises:
        SettingError: another name, or an argument of another type.
    """
    if callable(lr_scaling):
        return lr_scaling
    if lr_scaling == "adascale":
        return AdaScale(base_batch)
    named: dict[str | None, Scaling] = {"sqrt": square_root, "linear": linear, None: unscaled}
    return named[lr_scaling]


@contextmanager
def scale_lr(optimizer: Optimizer, factor: float) -> Iterator[list[float]]:
    """Multiplies every group's learning rate inside the block and puts the old ones back.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Schedulers never see the factor. A tensor stays the same tensor, which compiled and captured
    steps hold on to; one that several groups share is multiplied once. A factor of 1 touches
    nothing, so whoever sets learning rates inside `optimizer.step()` needs `lr_scaling=None`.

    Args:
        optimizer: whose groups.
        factor: finite, not negative.
    Returns:
        The learning rates in force, one per group; nan for a group without one.
    Raises:
        SettingError: another factor, or one for a group without a learning rate.
        LoopError: at the block's end, where somebody else has set a learning rate inside it; the
            old ones are back.
    """
    factor = float(factor)
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    groups = list(optimizer.param_groups)
    if factor == 1:
        yield [_number(group.get("lr")) for group in groups]
        return
    _require_rates(groups)
    before = [group["lr"] for group in groups]
    tensors = {lr: lr.detach().clone() for lr in before if isinstance(lr, Tensor)}
    for tensor in tensors:
        tensor.detach().mul_(factor)
    for group, lr in zip(groups, before, strict=True):
        group["lr"] = lr if isinstance(lr, Tensor) else lr * factor
    used = [(lr, times_written(lr), _number(lr)) for lr in (group["lr"] for group in groups)]
    try:
        yield [rate for _, _, rate in used]
        _require_unchanged(groups, used)
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
        for tensor, value in tensors.items():
            tensor.detach().copy_(value)


def _require_rates(groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        if group.get("lr") is None:
            raise SettingError(
                f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                "lr_scaling=None"
            )


def _require_unchanged(
    groups: list[dict[str, Any]], used: list[tuple[float | Tensor, int, float]]
) -> None:
    """Compares values only where something was written: a GPU's would be waited for."""
    for number, (group, (lr, writes, rate)) in enumerate(zip(groups, used, strict=True)):
        now = group.get("lr")
        written = now is not lr or times_written(lr) != writes
        if written and (other := _number(now)) != rate:
            raise LoopError(
                f"the learning rate of parameter group {number} was set to {other} during the "
                f"step, where AdaptiveBatch had put {rate} in force; set it between the steps, or "
                "pass lr_scaling=None"
            )


def times_written(lr: float | Tensor | None) -> int:
    """How often autograd has seen a rate written to in place; 0 for a number."""
    return lr._version if isinstance(lr, Tensor) else 0


def _number(lr: float | Tensor | None) -> float:
    if lr is None:
        return math.nan
    return float(lr.item() if isinstance(lr, Tensor) else lr)
