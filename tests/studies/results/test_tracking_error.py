"""Bias, scatter and lag of made series are the ones that were put in."""

import math

import numpy as np
import pytest

from studies.results.tracking_error import SHIFTS, over_seeds, tracking_error, verdict


def walk(steps=300, seed=0):
    return np.cumsum(np.random.default_rng(seed).normal(size=steps))


def test_bias_and_scatter_of_differences_by_hand():
    error = tracking_error([9.0, 1.0, 2.0, 6.0], [0.0, 0.0, 0.0, 0.0], 1)
    assert (3.0, pytest.approx(math.sqrt(7)), 0, 3) == (
        error.bias,
        error.scatter,
        error.failures,
        error.steps,
    )
    assert pytest.approx(4.0) == error.rms


@pytest.mark.parametrize("late", [-5, 0, 7, 39])
def test_the_lag_of_a_shifted_series_is_the_shift_whatever_its_offset(late):
    truth = walk()
    series = np.roll(truth, late) + 0.3
    noise = np.random.default_rng(1).normal(scale=0.5, size=len(truth))
    assert late == tracking_error(series + noise, truth, 40).lag


def test_an_exponential_average_is_late_by_its_mean_age():
    truth = np.repeat(walk(40, seed=2), 40)  # steps of 40
    series, weight = [truth[0]], math.exp(-1 / 4)
    for value in truth[1:]:
        series.append(weight * series[-1] + (1 - weight) * value)
    age = weight / (1 - weight)  # 3.5 steps
    assert abs(age - tracking_error(series, truth, 40).lag) < 2


@pytest.mark.parametrize("late", [SHIFTS[-1] + 20, SHIFTS[0] - 12])
def test_a_shift_outside_the_range_is_no_lag(late):
    truth = np.linspace(0, 1, 300) ** 2
    shifted = np.interp(np.arange(300) - late, np.arange(300), truth)
    assert math.isnan(tracking_error(shifted, truth, 40).lag)


def test_straight_lines_have_no_lag():
    truth = np.arange(300) * 0.01
    assert math.isnan(tracking_error(truth - 0.2, truth, 40).lag)


def test_a_short_series_has_no_lag():
    assert math.isnan(tracking_error(walk(90), walk(90), 40).lag)


def test_values_that_are_not_finite_are_counted_and_left_out():
    truth = walk()
    series = truth + 0.5
    series[[50, 60, 70]] = math.inf, math.nan, -math.inf
    error = tracking_error(series, truth, 40)
    assert (3, 260, pytest.approx(0.5), 0.0) == (error.failures, error.steps, error.bias, error.lag)
    lost = tracking_error([math.nan] * 300, truth, 40)
    assert 260 == lost.failures
    assert all(math.isnan(number) for number in (lost.bias, lost.scatter, lost.lag))


def test_the_interval_over_seeds_is_the_t_interval():
    interval = over_seeds([1.0, 2.0, None, 3.0, math.nan])
    half_width = 4.3027 / math.sqrt(3)  # t of two degrees of freedom
    assert (2.0, 3) == (interval.mean, interval.seeds)
    assert pytest.approx((2 - half_width, 2 + half_width), abs=1e-3) == (
        interval.low,
        interval.high,
    )
    assert "+2.0 (-0.5 to +4.5)" == interval.text(1, signed=True)


def test_one_seed_has_no_end_and_none_has_no_mean():
    assert (-math.inf, math.inf) == (over_seeds([1.0]).low, over_seeds([1.0]).high)
    assert "none" == over_seeds([math.nan]).text()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.1, 0.0, -0.1], "tracks"),
        ([0.9, 1.0, 0.9, 1.1], "does not"),
        ([-1.0, 1.0, 0.0], "undecided"),
        ([0.1], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_verdict_needs_the_whole_interval(values, expected):
    inside = (over_seeds([0.0, 0.01]), -1.0, 1.0)
    assert expected == verdict([inside, (over_seeds(values), -0.3, 0.3)])
