"""The noise scale of an observed training against slow float64 sums, and its interval."""

import itertools
import math
import random

import numpy as np
import pytest

from bigbatch import GradientStatistics
from bigbatch.advisor.noise_trend import NoiseTrend, mean_noise_scale
from bigbatch.advisor.observations import Measurement
from made_observations import measured, steady


def slow_mean(rows, batch):
    """sum B_t p_t / sum p_t in numpy, where each step has the ratio of its segment."""
    parts = np.array_split(np.array(rows, dtype=np.float64), min(8, max(1, len(rows) // 8)))
    shares = []  # (B_t p_t, p_t) of each step
    for part in parts:
        signal, noise = np.average(part[:, :2], axis=0, weights=part[:, 2])
        p = batch * signal / (batch * signal + noise) if signal > 0 else 0.0
        shares += [(noise / signal * p if signal > 0 else batch, p)] * len(part)
    products, progress = np.sum(shares, axis=0)
    return products / progress


@pytest.mark.parametrize("steps", [1, 7, 8, 16, 64, 128])
def test_the_mean_is_that_of_slow_sums(steps):
    draw = random.Random(steps)
    rows = [
        (draw.uniform(0.5, 2), 500 * draw.random(), draw.choice([32, 64])) for _ in range(steps)
    ]
    actual = mean_noise_scale([measured(i, *row) for i, row in enumerate(rows)], 48)
    assert pytest.approx(slow_mean(rows, 48), rel=1e-12) == actual


@pytest.mark.parametrize("steps", [16, 64])
def test_a_segment_without_signal_made_no_progress(steps):
    rows = [(-0.5 if i < 8 else 1.0, 100.0, 64) for i in range(steps)]
    actual = mean_noise_scale([measured(i, *row) for i, row in enumerate(rows)], 64)
    assert pytest.approx(slow_mean(rows, 64), rel=1e-12) == actual
    assert actual > 100


@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_a_constant_noise_scale_is_its_mean(steps):
    trend = NoiseTrend.of([measured(i, 2.0, 300.0) for i in range(steps)], 64)
    assert pytest.approx(150.0) == trend.noise_scale
    assert all(pytest.approx(150.0) == segment.noise_scale for segment in trend.segments)


def test_the_later_half_of_the_measured_steps_counts():
    early, late = ([measured(i, 1.0, noise) for i in range(16)] for noise in (10.0, 80.0))
    trend = NoiseTrend.of([*early, *late], 64)
    assert pytest.approx(80.0) == trend.noise_scale
    assert pytest.approx(80.0) == trend.low == trend.high
    assert 10.0 == trend.segments[0].noise_scale


@pytest.mark.parametrize("signal", [0.0, -0.1])
@pytest.mark.parametrize("steps", [1, 8, 40])
def test_no_signal_at_all_is_an_infinite_noise_scale(steps, signal):
    trend = NoiseTrend.of([measured(i, signal, 10.0) for i in range(steps)], 64)
    assert math.inf == trend.noise_scale == trend.high
    assert trend.low >= 0
    assert {math.inf} == {segment.noise_scale for segment in trend.segments}
    assert math.isnan(trend.factor)


def test_no_noise_at_all_is_a_noise_scale_of_zero():
    trend = NoiseTrend.of([measured(i, 1.0, 0.0) for i in range(16)], 64)
    assert 0 == trend.noise_scale
    assert trend.low <= trend.high < 1e-6


def test_steps_with_a_negative_signal_count_in_their_segment():
    signals = [3.0, -1.0] * 4
    trend = NoiseTrend.of([measured(i, signal, 20.0) for i, signal in enumerate(signals)], 64)
    assert pytest.approx(20.0) == trend.noise_scale
    assert trend.low < 20 < trend.high


@pytest.mark.parametrize("steps", [1, 2])
def test_one_or_two_steps_have_no_interval(steps):
    trend = NoiseTrend.of([measured(i, 1.0, 10.0) for i in range(steps)], 64)
    assert (0.0, math.inf) == (trend.low, trend.high)


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (15, 1), (16, 2), (63, 7), (500, 8)])
def test_segments_have_eight_measured_steps_or_more_and_leave_none_out(steps, expected):
    measurements = [measured(3 * i, 1.0, 10.0 + i) for i in range(steps)]
    segments = NoiseTrend.of(measurements, 64).segments
    assert expected == len(segments)
    assert (0, 3 * (steps - 1)) == (segments[0].first, segments[-1].last)
    ends = [(one.last, two.first) for one, two in itertools.pairwise(segments)]
    assert all(last + 3 == first for last, first in ends)


def test_the_factor_is_that_of_the_last_segment_over_the_first():
    scales = [10.0] * 8 + [20.0] * 8 + [40.0] * 8
    trend = NoiseTrend.of([measured(i, 1.0, scale) for i, scale in enumerate(scales)], 64)
    assert 4.0 == trend.factor
    assert 1.0 == NoiseTrend.of(steady(10.0, steps=8), 64).factor


def test_layers_share_the_noise_and_come_by_their_share():
    layers = {"first": (1.0, 30.0), "second": (0.5, 60.0), "third": (-0.1, 10.0)}
    trend = NoiseTrend.of([measured(i, 1.4, 100.0, **layers) for i in range(4)], 64)
    assert ["second", "first", "third"] == [layer.name for layer in trend.layers]
    assert pytest.approx([0.6, 0.3, 0.1]) == [layer.share for layer in trend.layers]
    assert pytest.approx(1.0) == sum(layer.share for layer in trend.layers)
    assert pytest.approx([120.0, 30.0, math.inf]) == [one.noise_scale for one in trend.layers]


def test_layers_that_some_steps_lack_are_summed_over_the_others():
    early = [measured(i, 1.0, 10.0, c=(1.0, 10.0)) for i in range(2)]  # not among the later half
    later = [measured(2, 1.0, 10.0, a=(1.0, 10.0)), measured(3, 1.0, 10.0, b=(1.0, 10.0))]
    layers = NoiseTrend.of([*early, *later], 64).layers
    assert [("a", 0.5), ("b", 0.5)] == [(layer.name, layer.share) for layer in layers]


def test_the_total_is_between_the_layers_where_the_noise_scale_rises():
    steps = [
        measured(i, 2 / (1 + i), 20.0, a=(1 / (1 + i), 8.0), b=(1 / (1 + i), 12.0))
        for i in range(64)
    ]
    trend = NoiseTrend.of(steps, 64)
    b, a = (layer.noise_scale for layer in trend.layers)
    assert a < trend.noise_scale < b


def test_steps_without_layers_have_none():
    assert () == NoiseTrend.of(steady(10.0), 64).layers


def gaussian_steps(draw, steps, scale, dimensions=200, groups=8, samples=64):
    """Measurements of gradients mu + gaussian noise, |mu| = 1, tr(Sigma) = scale."""
    mu = np.zeros(dimensions)
    mu[0] = 1.0
    size = samples // groups
    deviation = math.sqrt(scale / dimensions / size)
    means = mu + deviation * draw.standard_normal((steps, groups, dimensions))
    sqnorms = (means.mean(1) ** 2).sum(1)
    noise = (size * (means**2).sum((1, 2)) - samples * sqnorms) / (groups - 1)
    signal = sqnorms - noise / samples
    return [
        Measurement(i, GradientStatistics(float(s), float(n), samples, groups))
        for i, (s, n) in enumerate(zip(signal, noise, strict=True))
    ]


@pytest.mark.parametrize(("steps", "scale"), [(10, 30.0), (40, 300.0), (160, 1000.0)])
def test_the_interval_holds_the_true_noise_scale_as_often_as_it_says(steps, scale):
    """Nominal 90 % of 200 trainings, whose own standard deviation is 2 %: 0.83 to 0.98."""
    draw = np.random.default_rng(steps)
    trends = [NoiseTrend.of(gaussian_steps(draw, steps, scale), 64) for _ in range(200)]
    covered = sum(trend.low <= scale <= trend.high for trend in trends) / len(trends)
    assert 0.83 <= covered <= 0.98
