"""Bias-corrected running averages of gradient statistics."""

import math
from dataclasses import replace
from typing import Any, Literal

from bigbatch.setting_types import Coverage, Positive, checked
from bigbatch.statistics.confidence import Scatter
from bigbatch.statistics.noise_scale import GradientStatistics


class NoiseAverage:
    """Running averages of signal and noise; the noise scale is the ratio of the averages.

    The noise scale of one step is often +inf, so its own average would be useless. With a window in
    samples, a step of N samples multiplies the weight of earlier steps by exp(-N / window), so the
    window is the same number of samples at any batch size.

        x <- w x + (1 - w) x_step,  divided by 1 - product of all w
        w = exp(-N / window) for a window in samples, exp(-1 / window) for one in steps

    Args:
        window: length of the window; positive.
        unit: what the window counts, "samples" or "steps".
        confidence: coverage of an interval for the window's average, from the scatter of successive
            steps; None for no interval. The interval ignores drift within the window.
    Raises:
        SettingError: the window is not positive and finite, or the coverage not in (0, 1).
    Example:
        >>> average = NoiseAverage(1000)
        >>> average.update(GradientStatistics(-1.0, 60.0, samples=100, micro_batches=4)).noise_scale
        inf
        >>> second = average.update(GradientStatistics(3.0, 60.0, samples=100, micro_batches=4))
        >>> round(second.noise_scale, 1)
        54.5
    """

    @checked
    def __init__(
        self,
        window: Positive,
        unit: Literal["samples", "steps"] = "samples",
        *,
        confidence: Coverage | None = None,
    ) -> None:
        self.window, self.unit = window, unit
        self.confidence = confidence
        self._scatter = Scatter()
        self._grad_sqnorm = 0.0
        self._grad_variance = 0.0
        self._weight = 0.0  # 1 - product of all w

    def update(self, noise: GradientStatistics) -> GradientStatistics:
        """Adds one step; returns it with signal, noise and interval of the window.

        A step that is not finite is returned unchanged and not added.
        """
        if not (math.isfinite(noise.grad_sqnorm) and math.isfinite(noise.grad_variance)):
            return noise
        windows = (noise.samples if self.unit == "samples" else 1) / self.window
        decay, share = math.exp(-windows), -math.expm1(-windows)
        self._grad_sqnorm = decay * self._grad_sqnorm + share * noise.grad_sqnorm
        self._grad_variance = decay * self._grad_variance + share * noise.grad_variance
        self._weight = decay * self._weight + share
        self._scatter.update(noise.grad_sqnorm, noise.grad_variance, decay, share)
        signal, variance, interval = self.grad_sqnorm, self.grad_variance, None
        if self.confidence is not None:
            interval = self._scatter.interval(
                signal, variance, noise.samples, self._weight, self.confidence
            )
        return replace(noise, grad_sqnorm=signal, grad_variance=variance, interval=interval)

    @property
    def grad_sqnorm(self) -> float:
        """Average signal; nan before the first step."""
        return self._grad_sqnorm / self._weight if self._weight else math.nan

    @property
    def grad_variance(self) -> float:
        """Average noise; nan before the first step."""
        return self._grad_variance / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes."""
        return {
            "grad_sqnorm": self._grad_sqnorm,
            "grad_variance": self._grad_variance,
            "weight": self._weight,
            "scatter": self._scatter.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._grad_sqnorm, self._grad_variance = state["grad_sqnorm"], state["grad_variance"]
        self._weight = state["weight"]
        self._scatter.load(state["scatter"])
