"""What the studies of coverage and of similarity make of the steps they measure."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import GradientMeter, GradientStatistics, NoiseAverage
from studies import coverage, similarity_accuracy
from studies.coverage import Coverage
from studies.similarity_accuracy import Comparison
from studies.synthetic_gradients import Elliptical, measure_step

torch.set_num_threads(1)  # small tensors: a second thread only waits


def population(*, noise=1.0, seed):
    """Thirty elements, B_simple = 30 noise."""
    mean = torch.full((30,), 30**-0.5)
    variances = torch.full((30,), noise)
    return Elliptical("thirty", mean, variances, None, torch.Generator().manual_seed(seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def covering(truth, *intervals):
    """Those of a half are these, those of the other levels hold everything."""
    of_each = {level: [(-1.0, 1.0)] * len(intervals) for level in coverage.LEVELS}
    return Coverage("some", "step", "equal", 4, 64, truth, of_each | {0.5: list(intervals)})


# rows


def test_coverage_counts_the_intervals_that_hold_the_truth_and_on_which_side_it_falls():
    row = covering(0.5, (0.1, 0.5), (0.6, 0.9), (0.2, 0.4), (0.0, 1.0), (0.1, 0.3))
    assert pytest.approx((0.2, 0.4, 0.4)) == (row.below(0.5), row.above(0.5), row.covered(0.5))
    assert pytest.approx(0.3) == row.width(0.5)
    expected = ["some", "step", "equal", "4", "64", "0.500", "0.400", *["1.000"] * 5]
    assert [*expected, "0.000", "0.000", "2.000"] == [*row.row().values()]  # of nine tenths


def test_a_comparison_has_mean_deviation_and_error_of_both():
    row = Comparison("some", 0.3, 4, 64, 0.25, [0.0, 0.5], [0.5, 0.75])
    assert pytest.approx(0.25) == row.error(row.similarities)
    assert pytest.approx(math.sqrt((0.25**2 + 0.5**2) / 2)) == row.error(row.halves)
    expected = ["some", "4", "64", "0.250", "0.250", "0.354", "0.250", "0.625", "0.177", "0.395"]
    assert expected == [*row.row().values()]


# sizes


@given(st.integers(1, 5000), st.integers(1, 64))
def test_equal_sizes_are_equal_and_nearest_to_their_sum(samples, count):
    sizes = coverage.equal_sizes(samples, count)
    assert [sizes[0]] * count == sizes
    assert sizes[0] >= 1
    assert abs(sum(sizes) - samples) <= count / 2 or sizes[0] == 1


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 9))
def test_ragged_sizes_are_those_of_a_ramp_in_some_order(samples, count, seed):
    sizes = coverage.ragged_sizes(samples, count, seeded(seed))
    ramp = [samples * 2 * place / (count * (count + 1)) for place in range(1, count + 1)]
    assert len(sizes) == count
    for expected, size in zip(ramp, sorted(sizes), strict=True):
        assert abs(expected - size) <= 0.5 + 1e-9 or (size == 1 and expected < 1)


def test_ragged_sizes_come_in_more_than_one_order():
    draw = seeded(0)
    assert len({tuple(coverage.ragged_sizes(100, 5, draw)) for _ in range(20)}) > 10


# intervals of steps


def test_every_setting_is_measured_and_its_truth_is_that_of_its_own_samples():
    rows = list(coverage.step_coverage(population(seed=1), seed=1, trials=2))
    assert {("equal", k) for k in (3, 4, 8, 16, 64)} | {
        ("ragged", k) for k in (3, 4, 8, 16, 64)
    } == {(row.sizes, row.micro_batches) for row in rows}
    assert len(rows) == len({(row.sizes, row.micro_batches, row.samples) for row in rows})
    for row in rows:
        assert pytest.approx(1 / (1 + 2 * 30 / row.samples)) == row.truth
        assert row.samples > 1.5 * row.micro_batches  # two each, less the rounding of ragged sizes
        assert [*coverage.LEVELS] == [*row.intervals]
        for one, other in zip(coverage.LEVELS, coverage.LEVELS[1:], strict=False):
            assert 0 < row.width(one) < row.width(other)
    assert [0.1, 0.3, 0.7] == [round(row.truth, 1) for row in rows[:3]]


@pytest.mark.parametrize("level", coverage.LEVELS)
def test_the_intervals_are_those_of_a_meter_asked_for_their_level(level):
    row = next(coverage.step_coverage(population(seed=2), seed=2, trials=3))
    replica = population(seed=2)
    with GradientMeter(replica.parameters(), confidence=level) as meter:
        expected = [
            measure_step(meter, replica, [row.samples // 3] * 3).similarity_interval
            for _ in range(3)
        ]
    assert expected == row.intervals[level]


# intervals of windows


@pytest.mark.thorough
def test_a_still_window_holds_its_truth_most_of_the_time():
    row = coverage.window_coverage(population(seed=3), trials=60)
    assert [60] * 6 == [len(ends) for ends in row.intervals.values()]
    # nominal 0.9; binomial deviation 0.04, and the method itself promises no more than 0.8
    assert 0.75 < row.covered(0.9)
    assert 0.02 < row.width(0.9) < 0.3


def test_the_truth_of_a_drifting_window_is_what_a_window_over_the_truth_shows():
    model = population(seed=4)
    average, last = coverage.drift_coverage(model, trials=1)
    window = NoiseAverage(16 * average.samples)
    for left in reversed(range(48)):  # three windows, in two of which the signal halves
        exact = GradientStatistics(
            model.grad_sqnorm * 2 ** (left / 32),
            model.grad_variance,
            average.samples,
            average.micro_batches,
        )
        smooth = window.update(exact)
    assert pytest.approx(smooth.similarity) == average.truth
    assert pytest.approx(exact.similarity) == last.truth
    assert average.intervals == last.intervals


def test_intervals_of_a_drifting_window_lie_about_its_truth_and_not_the_present_one():
    average, last = coverage.drift_coverage(population(seed=5), trials=8)
    middle = fmean((low + high) / 2 for low, high in average.intervals[0.9])
    # intervals of 90 % are 0.06 wide, so the mean of 8 middles scatters by 0.007
    assert average.truth > last.truth + 0.06
    assert pytest.approx(average.truth, abs=0.03) == middle


# halves


def test_a_comparison_has_both_estimates_of_the_same_steps():
    first = next(similarity_accuracy.compare(population(seed=6), trials=3))
    replica = population(seed=6)
    with GradientMeter(replica.parameters(), half_batch_cosine=True) as meter:
        steps = [
            measure_step(
                meter, replica, [first.samples // first.micro_batches] * first.micro_batches
            )
            for _ in range(3)
        ]
    assert [step.similarity for step in steps] == first.similarities
    assert [step.half_batch_cosine for step in steps] == first.halves


def test_settings_with_less_than_one_sample_a_micro_batch_are_left_out():
    rows = list(similarity_accuracy.compare(population(seed=7), trials=2))
    counts = {near: [row.micro_batches for row in rows if row.near == near] for near in (0.1, 0.7)}
    # B_simple = 30: phi = 0.1 is at 6.7 samples, which 8 micro-batches share nearly, 16 cannot
    assert {0.1: [2, 4, 8], 0.7: [2, 4, 8, 16, 32, 64]} == counts
    for row in rows:
        assert pytest.approx(1 / (1 + 2 * 30 / row.samples)) == row.truth
        assert 0 == row.samples % row.micro_batches
