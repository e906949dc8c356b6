"""How the learning rate follows the batch size: the factors by name."""

import math
from collections.abc import Callable
from typing import Any, Literal

from bigbatch.setting_types import checked
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics

Scaling = Callable[[int, int, GradientStatistics | None], float]
"""(samples of the step, base batch, statistics of the step if measured) -> factor."""

LRScaling = Literal["sqrt", "linear", "adascale"] | Scaling | None


RULES: dict[str | None, Scaling] = {
    # for noise-dominated training and Adam-like optimizers: SimiGrad's code; Krizhevsky 2014
    # (arXiv 1404.5997)
    "sqrt": lambda batch_size, base_batch, _: math.sqrt(batch_size / base_batch),
    # for SGD: Goyal et al. 2017 (arXiv 1706.02677)
    "linear": lambda batch_size, base_batch, _: batch_size / base_batch,
    None: lambda *_: 1.0,
}


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
    """The rule that a name stands for, or the function itself."""
    if callable(lr_scaling):
        return lr_scaling
    return AdaScale(base_batch) if lr_scaling == "adascale" else RULES[lr_scaling]
