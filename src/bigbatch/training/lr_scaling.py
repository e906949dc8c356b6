"""How the learning rate follows the batch size: by a factor that is in force during a step."""

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
"""(samples of the step, base batch, statistics of the step if measured) -> factor."""

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
    """1: the learning rate does not follow."""
    return 1.0


class AdaScale:
    """AdaScale's gain: between 1 (no noise) and B / B_base (only noise).

    The formula is that of `GradientStatistics.adascale_gain`. Signal and noise are averaged over a
    window of 1000 base batches first; a step that is not measured uses the average so far, and 1
    before there is one.

    Source:
        Johnson et al. 2020 (arXiv 2007.05105).
    """

    def __init__(self, base_batch: int) -> None:
        self._average = NoiseAverage(1000 * base_batch)

    def __call__(self, batch_size: int, base_batch: int, noise: GradientStatistics | None) -> float:
        """The factor of a step; adds its statistics to the averages."""
        average = self._average
        if noise is not None:
            average.update(noise)
        if math.isnan(average.grad_sqnorm):
            return 1.0
        means = GradientStatistics(average.grad_sqnorm, average.grad_variance, batch_size, 0)
        return means.adascale_gain(base_batch)

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._average.load_state_dict(state)


@checked
def resolve_scaling(lr_scaling: LRScaling, base_batch: int) -> Scaling:
    """The function that a name stands for.

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
    functions: dict[str | None, Scaling] = {"sqrt": square_root, "linear": linear, None: unscaled}
    return functions[lr_scaling]


@contextmanager
def scale_lr(optimizer: Optimizer, factor: float) -> Iterator[list[float]]:
    """Multiplies every group's learning rate inside the block and restores it afterwards.

        lr <- factor lr,   and after the block lr as it was, to the last bit

    Schedulers never see the factor. A tensor stays the same tensor, as compiled and captured steps
    need; one that several groups share is multiplied once. A factor of 1 changes nothing, so an
    optimizer that sets learning rates inside its `step()` needs `lr_scaling=None`.

    Args:
        optimizer: the optimizer that has the groups.
        factor: a finite number, not negative.
    Returns:
        The learning rates in force, one per group; nan for a group without one.
    Raises:
        SettingError: another factor, or one for a group without a learning rate.
        LoopError: at the block's end, if a learning rate was set inside it; the old ones are
            restored.
    """
    factor = float(factor)
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(f"the learning-rate factor {factor} is not finite, or negative")
    groups = list(optimizer.param_groups)
    if factor == 1:
        yield [_number(group.get("lr")) for group in groups]
        return
    for number, group in enumerate(groups):
        if group.get("lr") is None:
            raise SettingError(
                f"parameter group {number} has no learning rate to scale; give it lr=, or pass "
                "lr_scaling=None"
            )
    rates = [group["lr"] for group in groups]
    tensors = {lr: lr.detach().clone() for lr in rates if isinstance(lr, Tensor)}
    for tensor in tensors:
        tensor.detach().mul_(factor)
    for group, lr in zip(groups, rates, strict=True):
        group["lr"] = lr if isinstance(lr, Tensor) else lr * factor
    scaled = [(lr, times_written(lr), _number(lr)) for lr in (group["lr"] for group in groups)]
    try:
        yield [value for _, _, value in scaled]
        _require_unchanged(groups, scaled)
    finally:
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr
        for tensor, value in tensors.items():
            tensor.detach().copy_(value)


def _require_unchanged(
    groups: list[dict[str, Any]], scaled: list[tuple[float | Tensor, int, float]]
) -> None:
    """Compares values only after a write, as reading them from a GPU would wait."""
    for number, (group, (lr, writes, value)) in enumerate(zip(groups, scaled, strict=True)):
        present = group.get("lr")
        written = present is not lr or times_written(lr) != writes
        if written and (other := _number(present)) != value:
            raise LoopError(
                f"the learning rate of parameter group {number} was set to {other} during the "
                f"step, where AdaptiveBatch had set {value}; set it between the steps, or pass "
                "lr_scaling=None"
            )


def times_written(lr: float | Tensor | None) -> int:
    """Number of in-place writes to a rate that autograd has seen; 0 for a number."""
    return lr._version if isinstance(lr, Tensor) else 0


def _number(lr: float | Tensor | None) -> float:
    if lr is None:
        return math.nan
    return float(lr.item() if isinstance(lr, Tensor) else lr)
