"""The noise scale of an observed training: its mean, its interval, how it moves, which layers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbatch.advisor.observations import Measurement
from bigbatch.statistics.confidence import Interval, log_ratio, student_t

LEVEL = 0.9
_SEGMENT = 8  # measured steps of a segment, at least
_SEGMENTS = 8  # at most
_BLOCKS = 20  # of the jackknife, at most


@dataclass(frozen=True)
class Segment:
    """Consecutive measured steps."""

    # first, last: numbers of the optimizer steps
    first: int
    last: int
    noise_scale: float  # of the averages of signal and noise, in samples; inf without signal


@dataclass(frozen=True)
class LayerNoise:
    """A layer's part of the noise."""

    name: str  # of the module
    share: float  # its share of the gradient variance
    noise_scale: float  # its own noise scale, in samples


@dataclass(frozen=True)
class NoiseTrend:
    """The noise scale over the observed steps."""

    # the mean over the later half of the measured steps, which is nearer to the steps that follow;
    # weighted by the progress that each made, in samples
    noise_scale: float
    # low, high: its 90 % interval, by a jackknife over blocks of consecutive measured steps
    low: float
    high: float
    segments: tuple[Segment, ...]  # how it moved
    # of the same steps, by their share of the noise, the largest first
    layers: tuple[LayerNoise, ...]

    @classmethod
    def of(cls, measurements: Sequence[Measurement], batch_size: int) -> "NoiseTrend":
        """The trend of a training with this batch size."""
        later = measurements[len(measurements) // 2 :]
        mean = mean_noise_scale(later, batch_size)
        low, high = _interval(later, batch_size, mean)
        segments = tuple(map(_segment, _segments(measurements)))
        return cls(mean, low, high, segments, _layers(later, batch_size))

    @property
    def factor(self) -> float:
        """The last segment's noise scale over the first one's; nan if one has no signal."""
        first, last = self.segments[0].noise_scale, self.segments[-1].noise_scale
        return last / first if math.isfinite(first) and math.isfinite(last) and first else math.nan


def mean_noise_scale(measurements: Sequence[Measurement], batch_size: float) -> float:
    """The mean noise scale over the steps, weighted by their progress.

        mean = sum B_t p_t / sum p_t,   p_t = 1 / (1 + B_t / B)

    A training takes sum (a + b B)(1 + B_t / B) over equal progress, so the best constant B depends
    on the noise scales B_t by this mean. B_t is that of a segment of at least 8 measured steps,
    whose signal and noise are averaged first. A segment without signal made no progress; B_t p_t is
    then B.

    Returns:
        The mean in samples; inf if no segment has any signal.
    """
    products = progress = 0.0
    for part in _segments(measurements):
        signal, noise = _averages(part)
        total = batch_size * max(signal, 0.0) + noise
        if total > 0:
            products += len(part) * batch_size * noise / total
            progress += len(part) * batch_size * max(signal, 0.0) / total
    return products / progress if progress else math.inf


def _interval(
    measurements: Sequence[Measurement], batch_size: int, mean: float
) -> tuple[float, float]:
    """x -+ t se for x = ln(1 + B / mean), by leaving out blocks of steps."""
    count = len(measurements)
    blocks = min(_BLOCKS, count)
    if blocks < 3:
        return 0.0, math.inf
    x = _x(mean, batch_size)
    ends = [count * i // blocks for i in range(blocks + 1)]
    without = [
        _x(mean_noise_scale([*measurements[:low], *measurements[high:]], batch_size), batch_size)
        for low, high in itertools.pairwise(ends)
    ]
    center = math.fsum(without) / blocks
    variance = (blocks - 1) / blocks * math.fsum((value - center) ** 2 for value in without)
    width = student_t(LEVEL, blocks - 1) * math.sqrt(variance)
    return Interval(x - width, x + width, LEVEL, "window").noise_scale(batch_size)


def _x(noise_scale: float, batch_size: int) -> float:
    return 0.0 if math.isinf(noise_scale) else log_ratio(1.0, noise_scale, batch_size)


def _segments(measurements: Sequence[Measurement]) -> list[Sequence[Measurement]]:
    count = len(measurements)
    parts = min(_SEGMENTS, max(1, count // _SEGMENT))
    ends = [count * i // parts for i in range(parts + 1)]
    return [measurements[low:high] for low, high in itertools.pairwise(ends)]


def _averages(part: Sequence[Measurement]) -> tuple[float, float]:
    """Signal and noise, weighted by samples."""
    steps = [measurement.statistics for measurement in part]
    samples = math.fsum(step.samples for step in steps)
    signal = math.fsum(step.samples * step.grad_sqnorm for step in steps)
    noise = math.fsum(step.samples * step.grad_variance for step in steps)
    return signal / samples, noise / samples


def _segment(part: Sequence[Measurement]) -> Segment:
    signal, noise = _averages(part)
    return Segment(part[0].step, part[-1].step, noise / signal if signal > 0 else math.inf)


def _layers(measurements: Sequence[Measurement], batch_size: int) -> tuple[LayerNoise, ...]:
    parts: dict[str, list[Measurement]] = {}
    for one in measurements:
        for name, statistics in one.statistics.layers.items():
            parts.setdefault(name, []).append(replace(one, statistics=statistics))
    noises = {
        name: math.fsum(one.statistics.grad_variance for one in part)
        for name, part in parts.items()
    }
    total = math.fsum(noises.values()) or 1.0
    return tuple(
        LayerNoise(name, noises[name] / total, mean_noise_scale(parts[name], batch_size))
        for name in sorted(noises, key=noises.__getitem__, reverse=True)
    )
