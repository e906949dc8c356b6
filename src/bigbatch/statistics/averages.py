"""Bias-corrected running averages of gradient statistics, over a window that is set or chosen."""

import math
from dataclasses import replace
from typing import Any, Literal

from bigbatch.setting_types import Coverage, Positive, checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.confidence import MIN_RATIO, Interval, log_ratio, student_t
from bigbatch.statistics.noise_scale import GradientStatistics

_MIN_NOISE = 1e-150  # the square of a smaller noise underflows
_DIFFERENCE_FREEDOM = 2 / 3  # degrees of freedom of a squared difference of successive values
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
        self._windows = 0.0  # length of all steps, in windows
        self._previous: tuple[float, float] | None = None  # signal and noise of the previous step
        # with w the weight of a step, and ds, dn what signal and noise differ from the previous
        # one's, sums of w signal, w noise, w; of w^2 / 2 times ds ds, ds dn, dn dn; of w^2; of w^2
        # without the first step; of w^4
        self._sums = [0.0] * 9

    def update(self, noise: GradientStatistics) -> GradientStatistics:
        """Adds one step; returns it with signal, noise and interval of the window.

        A step that is not finite is returned unchanged and not added.
        """
        return self.at(noise) if self.add(noise) else noise

    def add(self, noise: GradientStatistics) -> bool:
        """Adds one step if it is finite, and returns whether it is."""
        signal, variance = noise.grad_sqnorm, noise.grad_variance
        if not (math.isfinite(signal) and math.isfinite(variance)):
            return False
        windows = (noise.samples if self.unit == "samples" else 1) / self.window
        decay, weight = math.exp(-windows), -math.expm1(-windows)
        if self.unit == "steps":
            weight *= noise.samples
        square = difference_square = weight**2
        if self._previous is None:
            self._previous, difference_square = (signal, variance), 0.0
        ds, dn = signal - self._previous[0], variance - self._previous[1]
        products = (square * product / 2 for product in (ds * ds, ds * dn, dn * dn))
        terms = [weight * signal, weight * variance, weight, *products]
        terms += [square, difference_square, square**2]
        decays = [decay] * 3 + [decay**2] * 5 + [decay**4]
        self._sums = [d * x + term for d, x, term in zip(decays, self._sums, terms, strict=True)]
        self._previous = signal, variance
        self._windows += windows
        return True

    def at(self, noise: GradientStatistics) -> GradientStatistics:
        """`noise` with signal, noise and interval of the window, to which it is not added."""
        signal, variance = self.grad_sqnorm, self.grad_variance
        interval = self._interval(noise.samples)
        return replace(noise, grad_sqnorm=signal, grad_variance=variance, interval=interval)

    def _interval(self, samples: float) -> Interval | None:
        """The interval for x of the averages, from their covariance

            C = sum w_t^2 (z_t - z_{t-1}) (z_t - z_{t-1})^T / 2,   z = (signal, noise)

        in which a slow drift does not count as noise (von Neumann et al. 1941; docs/theory.md (9)).
        Where batch sizes alternate widely, the interval is too wide.
        """
        if self.confidence is None:
            return None
        level, signal, noise = self.confidence, self.grad_sqnorm, self.grad_variance
        _, _, weight, ss, sn, nn, squares, difference_squares, fourths = self._sums
        freedom = _DIFFERENCE_FREEDOM * squares**2 / fourths if fourths else 0.0
        x = log_ratio(signal, noise, samples)
        if noise == 0 < signal:
            return Interval(x, x, level, "window")
        if not difference_squares or freedom < 1 or noise < _MIN_NOISE:
            return Interval(-math.inf, math.inf, level, "window")
        total = noise + samples * max(signal, (MIN_RATIO - 1) * noise / samples)
        dx_ds, dx_dn = samples / total, -samples * signal / (noise * total)
        variance = dx_ds**2 * ss + 2 * dx_ds * dx_dn * sn + dx_dn**2 * nn
        variance *= squares / difference_squares / weight**2
        half_width = student_t(level, round(freedom, 1)) * math.sqrt(max(0.0, variance))
        return Interval(x - half_width, x + half_width, level, "window")

    @property
    def filled(self) -> bool:
        """Whether the window is filled to a quarter, so that one step does not decide alone."""
        return self._windows > _FILLED * (1 - 1e-9)

    @property
    def step_variances(self) -> tuple[float, float]:
        """Variances of one step's signal and noise; infinite before the second step."""
        ss, nn, squares = self._sums[3], self._sums[5], self._sums[7]
        return (ss / squares, nn / squares) if squares else (math.inf, math.inf)

    @property
    def variance_share(self) -> float:
        """Variance of the averages over that of a step, sum w^2 / (sum w)^2; nan before one."""
        return self._sums[6] / self._sums[2] ** 2 if self._sums[2] else math.nan

    @property
    def grad_sqnorm(self) -> float:
        """Average signal; nan before the first step."""
        return self._sums[0] / self._sums[2] if self._sums[2] else math.nan

    @property
    def grad_variance(self) -> float:
        """Average noise; nan before the first step."""
        return self._sums[1] / self._sums[2] if self._sums[2] else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes."""
        state = {"unit": self.unit, "windows": self._windows, "previous": self._previous}
        return {**state, "sums": list(self._sums)}

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        sums, previous = [float(x) for x in state["sums"]], state["previous"]
        self._previous = None if previous is None else (float(previous[0]), float(previous[1]))
        self._windows, self._sums = float(state["windows"]), sums


class AdaptiveAverage:
    """Running averages over the longest window that agrees with all shorter ones.

    Of windows of 4, 8, 16, 32 and 64 steps, from the shortest on, the next one is taken while it
    differs from none of the shorter ones by more than chance:

        |x_long - x_short| <= 2 se,   se^2 = max(v_short - v_long, v_short / 5)

    for the signal, and for the noise unless they differ by less than 10 %. v is the variance of a
    step's value, from the differences of successive steps, times sum w^2 / (sum w)^2.

    Source:
        Lepski 1991 (the choice of a window by comparison with all shorter ones); docs/policies.md.
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
        """Adds a finite step, and chooses the window; returns the step with its averages."""
        if not all(average.add(noise) for average in self._averages):
            return noise
        self._chosen = self._longest()
        return self.at(noise)

    def at(self, noise: GradientStatistics) -> GradientStatistics:
        """`noise` with signal, noise and interval of the window, to which it is not added."""
        return self._averages[self._chosen].at(noise)

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes."""
        return {"averages": [average.state_dict() for average in self._averages]}

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        self._chosen = self._longest()

    def _longest(self) -> int:
        variances = self._averages[_SCATTER].step_variances
        for number, long in enumerate(self._averages):
            if not all(_agree(short, long, variances) for short in self._averages[:number]):
                return number - 1
        return len(_WINDOWS) - 1


def _agree(short: NoiseAverage, long: NoiseAverage, step_variances: tuple[float, float]) -> bool:
    least = _MIN_VARIANCE_SHARE * short.variance_share
    share = max(short.variance_share - long.variance_share, least)
    signal, noise = (_MAX_DEVIATION * math.sqrt(share * variance) for variance in step_variances)
    signal += _ROUNDING * abs(long.grad_sqnorm)
    noise = max(noise, _MAX_CHANGE * long.grad_variance)
    differs = abs(long.grad_sqnorm - short.grad_sqnorm) > signal
    return not differs and abs(long.grad_variance - short.grad_variance) <= noise
