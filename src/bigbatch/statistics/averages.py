"""Averages over samples, bias-corrected."""

import math
from dataclasses import replace
from typing import Any, Literal

from bigbatch.setting_types import Coverage, Positive, checked
from bigbatch.statistics.confidence import Interval, Scatter
from bigbatch.statistics.noise_scale import GradientStatistics


class NoiseAverage:
    """Running average of signal and noise, each by itself; divide afterwards.

    One step's noise scale is often +inf and its average useless; the ratio of the two averages is
    not. With a window in samples, a step of N samples keeps exp(-N / window) of what came before,
    so the window is the same number of samples whatever the batch size does.

        x <- w x + (1 - w) x_step,  divided by 1 - product of all w
        w = exp(-N / window) for a window in samples, exp(-1 / window) for one in steps

    Args:
        window: its length; positive.
        unit: what the window counts, "samples" or "steps".
        confidence: coverage of an interval for the window's average, from the scatter of successive
            steps; None for none. It says nothing of drift within the window.
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
        self._weight = 0.0  # of the steps seen, against the time before the first one

    def update(self, noise: GradientStatistics) -> GradientStatistics:
        """Takes one step in and returns it with signal, noise and interval those of the window.

        A step that is not finite is returned as it is and not taken in.
        """
        if not (math.isfinite(noise.grad_sqnorm) and math.isfinite(noise.grad_variance)):
            return noise
        passed = (noise.samples if self.unit == "samples" else 1) / self.window
        keep, share = math.exp(-passed), -math.expm1(-passed)
        self._grad_sqnorm = keep * self._grad_sqnorm + share * noise.grad_sqnorm
        self._grad_variance = keep * self._grad_variance + share * noise.grad_variance
        self._weight = keep * self._weight + share
        self._scatter.update(noise.grad_sqnorm, noise.grad_variance, keep, share)
        return replace(
            noise,
            grad_sqnorm=self.grad_sqnorm,
            grad_variance=self.grad_variance,
            interval=self._interval(noise.samples),
        )

    @property
    def grad_sqnorm(self) -> float:
        """Average signal; nan before the first step."""
        return self._grad_sqnorm / self._weight if self._weight else math.nan

    @property
    def grad_variance(self) -> float:
        """Average noise; nan before the first step."""
        return self._grad_variance / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""
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

    def _interval(self, samples: float) -> Interval | None:
        if self.confidence is None:
            return None
        weight = self._weight
        return self._scatter.interval(
            self.grad_sqnorm, self.grad_variance, samples, weight, self.confidence
        )
