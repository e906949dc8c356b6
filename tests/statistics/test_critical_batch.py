"""B_crit from loss curves: exact where the model is, covered where there is noise."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.statistics.critical_batch import BranchCurve, critical_batch, curve_points
from property_tests import property_test

SIZES = (16, 32, 64, 128)
SAMPLES = 1024


def curves_of(gain, noise=0.0, repeats=4, seed=0, sizes=SIZES):
    """Curves of gain(B, s), each repeat with noise of its own that all branches share in part."""
    draw = np.random.default_rng(seed)
    common = noise * draw.standard_normal(repeats)
    curves = []
    for size in sizes:
        samples = [size * step for step in curve_points(SAMPLES // size, SAMPLES // max(sizes))]
        scale = 1 + common + 0.3 * noise * draw.standard_normal(repeats)
        curves.append(
            BranchCurve(size, samples, [[k * gain(size, s) for s in samples] for k in scale])
        )
    return curves


def exponential(critical, rate=1.0):
    """The loss falls exponentially in s / (1 + B / B_crit); `rate` of it in all samples."""
    return lambda size, s: -math.expm1(-rate * s / SAMPLES / (1 + size / critical))


@pytest.mark.parametrize("critical", [8.0, 50.0, 400.0])
@pytest.mark.parametrize("rate", [0.01, 0.5, 2.0])
def test_the_critical_batch_of_the_model_is_found_however_long_the_branches(critical, rate):
    found = critical_batch(curves_of(exponential(critical, rate)), 0.9)
    # interpolation of a gain is right to 0.1 %, which is 1 % of a batch far beyond those tested
    assert pytest.approx(critical, rel=0.02) == found.estimate
    assert found.low <= min(critical, 128) * 1.02
    assert found.high >= critical * 0.98
    assert "" == found.reason


@pytest.mark.parametrize(("repeats", "noise"), [(3, 0.05), (6, 0.3)])
def test_the_interval_covers_as_often_as_it_says(repeats, noise):
    hits = 0
    for seed in range(200):
        found = critical_batch(curves_of(exponential(50.0), noise, repeats, seed), 0.9)
        hits += found.low <= 50 <= found.high
    # 200 draws of 0.9 have a standard deviation of 4.2; 3 of them either way
    assert 180 - 13 <= hits <= 180 + 13


def test_without_any_loss_to_the_batch_size_there_is_no_upper_end():
    found = critical_batch(curves_of(lambda size, s: s / SAMPLES), 0.9)
    assert math.inf == found.estimate == found.high
    noisy = [curves_of(lambda size, s: s / SAMPLES, 0.2, seed=seed) for seed in range(100)]
    found = [critical_batch(curves, 0.9) for curves in noisy]
    unbounded = [bool(each.reason) for each in found if each.high == math.inf]
    # an end of a two-sided interval of 90 % is wrong in 5; the standard deviation of 100 is 2.2
    assert sum(unbounded) >= 95 - 7
    assert any("no upper bound" in each.reason for each in found)


def test_larger_batches_that_gain_more_bound_the_critical_batch_from_below_only():
    found = critical_batch(curves_of(lambda size, s: s * size**0.2, noise=0.01), 0.9)
    assert (math.inf, 128.0, math.inf) == (found.estimate, found.low, found.high)
    assert "larger batches gain more" in found.reason


def test_smaller_batches_that_gain_more_in_as_many_steps_bound_it_from_above_only():
    found = critical_batch(curves_of(lambda size, s: s * size**-2.0, noise=0.01), 0.9)
    assert (0.0, 0.0, 16.0) == (found.estimate, found.low, found.high)
    assert "smaller batches" in found.reason


def test_a_loss_that_does_not_fall_says_nothing():
    found = critical_batch(curves_of(lambda size, s: 0.0), 0.9)
    assert math.isnan(found.estimate)
    assert (0.0, math.inf) == (found.low, found.high)
    assert "does not fall" in found.reason


@pytest.mark.parametrize(("diverged", "high"), [(16, math.inf), (64, 64.0)])
def test_a_batch_whose_loss_is_not_finite_is_named_and_too_large(diverged, high):
    curves = curves_of(lambda size, s: math.nan if size >= diverged else float(s))
    found = critical_batch(curves, 0.9)
    assert math.isnan(found.estimate)
    assert (0.0, high) == (found.low, found.high)
    assert f"the loss of batch {diverged} is not finite" == found.reason


def test_a_batch_whose_loss_rises_is_too_large():
    gain = exponential(50.0)
    curves = curves_of(lambda size, s: -gain(size, s) if size == 128 else gain(size, s), 0.05)
    found = critical_batch(curves, 0.9)
    assert math.isnan(found.estimate)
    assert (0.0, 128.0) == (found.low, found.high)
    assert "rises at batch 128" in found.reason


@given(least=st.integers(1, 40), more=st.integers(0, 1200))
@property_test(50)
def test_a_branch_is_evaluated_at_its_end_and_where_the_largest_has_as_many_steps(least, more):
    points = curve_points(least + more, least)
    assert (least, least + more) == (points[0], points[-1])
    assert sorted(set(points)) == points
    assert all(later <= 2 * earlier for earlier, later in pairwise(points))
