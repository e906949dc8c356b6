"""The fit of a step's time, against lines that are known."""

import json
import math
import random

import pytest

from bigbatch.policies.step_time import StepTime, StepTimes


def timed(points, **options):
    """The times of these (batch size, seconds)."""
    times = StepTimes(**options)
    for batch_size, seconds in points:
        times.add(batch_size, seconds)
    return times


def line(batch_sizes, fixed=0.02, per_sample=1e-4):
    return [(size, fixed + per_sample * size) for size in batch_sizes]


def test_a_line_is_found_exactly():
    fit = StepTime.fit(timed(line([64] * 5 + [96] * 7 + [700] * 5)).sizes)
    assert pytest.approx((0.02, 1e-4)) == (fit.fixed, fit.per_sample)
    assert pytest.approx(200) == fit.overhead
    assert (64, 700) == (fit.smallest, fit.largest)


@pytest.mark.parametrize(
    ("sizes", "known"),
    [
        ([64] * 5 + [96] * 5, True),
        ([64] * 5 + [95] * 5, False),  # less than half larger
        ([64] * 5 + [96] * 4, False),  # four steps
        ([64] * 99, False),
        ([], False),
    ],
)
def test_two_sizes_of_five_steps_that_differ_by_half_are_needed(sizes, known):
    assert known == (StepTime.fit(timed(line(sizes)).sizes) is not None)


def test_rare_long_steps_and_unknown_times_change_nothing():
    points = line([64, 256] * 12)
    points[5] = (256, 30.0)  # an evaluation
    points[8] = (64, 90.0)  # a checkpoint
    points += [(64, 0.0)] * 20  # unknown
    fit = StepTime.fit(timed(points).sizes)
    assert pytest.approx((0.02, 1e-4)) == (fit.fixed, fit.per_sample)


@pytest.mark.parametrize("seed", range(5))
def test_scatter_of_five_per_cent_leaves_the_overhead_within_a_third(seed):
    generator = random.Random(seed)
    points = line([64, 128, 256, 512] * 16)
    noisy = [(size, seconds * math.exp(0.05 * generator.gauss(0, 1))) for size, seconds in points]
    # a median of 16 is known to 1.6 %, of which the sizes make 15 % of the overhead
    assert StepTime.fit(timed(noisy).sizes).overhead == pytest.approx(200, rel=1 / 3)


def test_neither_part_is_negative():
    falling = StepTime.fit(timed([(64, 2.0), (640, 1.0)] * 5).sizes)
    assert (0.0, math.inf) == (falling.per_sample, falling.overhead)
    steep = StepTime.fit(timed([(64, 1.0), (640, 100.0)] * 5).sizes)
    assert (0.0, 0.0) == (steep.fixed, steep.overhead)
    squares = sum(size**2 / seconds**2 for size, seconds in ((64, 1.0), (640, 100.0)))
    products = sum(size / seconds for size, seconds in ((64, 1.0), (640, 100.0)))
    assert pytest.approx(products / squares) == steep.per_sample  # least squares through 0


def test_the_latest_sixteen_steps_of_a_size_count():
    points = line([64, 256] * 20) + line([64, 256] * 16, fixed=0.5, per_sample=2e-3)
    fit = StepTime.fit(timed(points).sizes)
    assert pytest.approx((0.5, 2e-3)) == (fit.fixed, fit.per_sample)


def test_sizes_of_a_quarter_octave_are_one():
    sizes = timed(line([100, 101, 102, 103, 104])).sizes
    assert [(102, 5)] == [(size.batch_size, size.steps) for size in sizes]


def test_measured_steps_count_if_there_are_no_others():
    times = StepTimes()
    for size, seconds in line([64, 256] * 5):
        times.add(size, seconds + 1.0, measured=True)
    assert pytest.approx(1.02) == StepTime.fit(times.sizes).fixed
    for size, seconds in line([64, 256] * 5):
        times.add(size, seconds, measured=False)
    assert pytest.approx(0.02) == StepTime.fit(times.sizes).fixed


def test_a_single_step_of_the_other_kind_changes_nothing():
    times = StepTimes()
    for size, seconds in line([64, 256] * 8):
        times.add(size, seconds, measured=True)
    before = times.sizes
    times.add(64, 9.0, measured=False)  # a skipped step, or the end of an epoch
    assert before == times.sizes


def test_the_kind_of_most_of_the_last_32_steps_counts():
    times = timed(line([64, 256] * 20, fixed=0.02))
    for size, seconds in line([64, 256] * 8, fixed=0.5):
        times.add(size, seconds, measured=True)
    assert pytest.approx(0.02) == StepTime.fit(times.sizes).fixed
    times.add(64, 0.5 + 64e-4, measured=True)
    assert pytest.approx(0.5) == StepTime.fit(times.sizes).fixed


def test_old_times_no_longer_count():
    times = timed(line([64, 256] * 5, fixed=9.0))  # before the machine was changed
    for size, seconds in line([128] * 299):
        times.add(size, seconds)
    assert [128, 256] == [size.batch_size for size in times.sizes]  # one step of 256 is left
    times.add(128, 0.02 + 128e-4)
    assert [128] == [size.batch_size for size in times.sizes]
    kept = StepTimes(max_age=None)
    for size, seconds in line([64, 256] * 5 + [128] * 400):
        kept.add(size, seconds)
    assert [64, 128, 256] == [size.batch_size for size in kept.sizes]


def test_each_number_of_ranks_has_its_own_times_and_a_state_keeps_them():
    one = timed(line([64, 256] * 5))
    two = StepTimes(ranks=2)
    two.load(json.loads(json.dumps(one.state())))
    assert () == two.sizes
    for size, seconds in line([64, 256] * 5, fixed=0.7):
        two.add(size, seconds)
    assert pytest.approx(0.7) == StepTime.fit(two.sizes).fixed
    again = StepTimes()
    again.load(two.state())
    assert one.sizes == again.sizes
    assert StepTime.fit(again.sizes).seconds([64, 256]) == pytest.approx(0.04 + 0.032)
