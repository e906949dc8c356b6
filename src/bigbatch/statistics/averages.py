"""Bias-corrected running averages of gradient statistics, over a window that is set or chosen."""

import math
from dataclasses import replace
from typing import Any, Literal

from bigbatch.setting_types import Coverage, Positive, checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.confidence import Scatter
from bigbatch.statistics.noise_scale import GradientStatistics

_FILLED = 0.25  # windows after which an average is filled
_WINDOWS = (4, 8, 16, 32, 64)  # steps that an adaptive window may have
_SCATTER = 2  # index of the window that the variance of a step is taken from
_MAX_DEVIATION = 2.0  # standard errors by which two windows may differ
_MAX_CHANGE = 0.1  # share by which their noise may differ too
_MIN_VARIANCE_SHARE = 0.2  # of a short window's variance, in the variance of a difference
_ROUNDING = 1e-12  # share by which averages of equal values may differ


class NoiseAverage:
    """Running averages of signal and noise; the noise scale is the ratio of the averages.

    The noise scale of one step is often +inf, so its own average would be useless. A step weighs
    as much as it has samples. With a window in samples, a step of N samples multiplies the weight
    of earlier steps by w = exp(-N / window), so the window is the same number of samples at any
    batch size; with one in steps, each step multiplies it by w = exp(-1 / window).

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
        self.scatter = Scatter()
        self._grad_sqnorm = 0.0
        self._grad_variance = 0.0
        self._weight = 0.0  # sum of the weights of all steps
        self._filling = 0.0  # 1 - product of all w

    def update(self, noise: GradientStatistics) -> GradientStatistics:
        """Adds one step; returns it with signal, noise and interval of the window.

        A step that is not finite is returned unchanged and not added.
        """
        return self.at(noise) if self.add(noise) else noise

    def add(self, noise: GradientStatistics) -> bool:
        """Adds one step if it is finite, and returns whether it is."""
        if not (math.isfinite(noise.grad_sqnorm) and math.isfinite(noise.grad_variance)):
            return False
        windows = (noise.samples if self.unit == "samples" else 1) / self.window
        decay, share = math.exp(-windows), -math.expm1(-windows)
        self._filling = decay * self._filling + share
        if self.unit == "steps":
            share *= noise.samples
        self._grad_sqnorm = decay * self._grad_sqnorm + share * noise.grad_sqnorm
        self._grad_variance = decay * self._grad_variance + share * noise.grad_variance
        self._weight = decay * self._weight + share
        self.scatter.update(noise.grad_sqnorm, noise.grad_variance, decay, share)
        return True

    def at(self, noise: GradientStatistics) -> GradientStatistics:
        """`noise` with signal, noise and interval of the window, to which it is not added."""
        signal, variance, interval = self.grad_sqnorm, self.grad_variance, None
        if self.confidence is not None:
            interval = self.scatter.interval(
                signal, variance, noise.samples, self._weight, self.confidence
            )
        return replace(noise, grad_sqnorm=signal, grad_variance=variance, interval=interval)

    @property
    def filled(self) -> bool:
        """Whether the window is filled to a quarter, so that one step does not decide alone."""
        return self._filling > -math.expm1(-_FILLED) * (1 - 1e-9)

    @property
    def variance_share(self) -> float:
        """Variance of the averages over that of a step; nan before the first."""
        return self.scatter.variance_share(self._weight)

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
            "unit": self.unit,
            "weight": self._weight,
            "filling": self._filling,
            "scatter": self.scatter.state(),
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        numbers = map(float, (state[n] for n in ("grad_sqnorm", "grad_variance", "weight")))
        self._grad_sqnorm, self._grad_variance, self._weight = numbers
        self._filling = float(state["filling"])
        self.scatter.load(state["scatter"])


class AdaptiveAverage:
    """Running averages over the longest window that agrees with all shorter ones.

    There is a `NoiseAverage` over each of 4, 8, 16, 32 and 64 steps. From the shortest on, the next
    one is taken while it differs from none of the shorter ones by more than chance:

        |x_long - x_short| <= 2 se,   se^2 = max(v_short - v_long, v_short / 5)

    for the signal, and for the noise unless they differ by less than 10 %. v_w is the variance of a
    step's value, from the differences of successive steps, times sum w^2 / (sum w)^2. So the window
    is long while nothing changes, and short soon after a change.

    Source:
        Lepski 1991 (the choice of a window by comparison with all shorter ones); docs/policies.md.
    Example:
        >>> average = AdaptiveAverage()
        >>> for signal in [1.0, 3.0, 2.0, 2.0] * 8:
        ...     mean = average.update(GradientStatistics(signal, 50.0, samples=8, micro_batches=4))
        >>> average.window, round(mean.noise_scale)
        (64, 25)
    """

    def __init__(self) -> None:
        self._averages = [NoiseAverage(window, "steps") for window in _WINDOWS]
        self._chosen = 0

    @property
    def window(self) -> int:
        """Steps of the chosen window."""
        return _WINDOWS[self._chosen]

    @property
    def filled(self) -> bool:
        """Whether there are enough steps for the shortest windows: a quarter of the third."""
        return self._averages[_SCATTER].filled

    def update(self, noise: GradientStatistics) -> GradientStatistics:
        """Adds one step, and chooses the window; returns the step with the window's averages.

        A step that is not finite is returned unchanged and not added.
        """
        if not all(average.add(noise) for average in self._averages):
            return noise
        self._chosen = self._longest()
        return self.at(noise)

    def at(self, noise: GradientStatistics) -> GradientStatistics:
        """`noise` with signal, noise and interval of the window, to which it is not added."""
        return self._averages[self._chosen].at(noise)

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes."""
        return {
            "averages": [average.state_dict() for average in self._averages],
            "chosen": self._chosen,
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        self._chosen = int(state["chosen"])

    def _longest(self) -> int:
        """Index of the longest window that agrees with all shorter ones."""
        step = self._averages[_SCATTER].scatter.step_variances
        for long in range(1, len(_WINDOWS)):
            shorter = self._averages[:long]
            if not all(_agree(short, self._averages[long], step) for short in shorter):
                return long - 1
        return len(_WINDOWS) - 1


def _agree(short: NoiseAverage, long: NoiseAverage, step: tuple[float, float]) -> bool:
    """Whether two averages differ by no more than chance, given the variances of one step."""
    differences = (
        abs(long.grad_sqnorm - short.grad_sqnorm),
        abs(long.grad_variance - short.grad_variance),
    )
    share = max(
        short.variance_share - long.variance_share, _MIN_VARIANCE_SHARE * short.variance_share
    )
    signal, noise = (_MAX_DEVIATION * math.sqrt(share * variance) for variance in step)
    slack = max(noise, _MAX_CHANGE * long.grad_variance)
    rounding = _ROUNDING * abs(long.grad_sqnorm)
    return differences[0] <= signal + rounding and differences[1] <= slack
