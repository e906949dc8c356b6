"""Which steps are measured: measuring takes its share of the time, and ranks choose alike."""

import itertools
import math
import random

import pytest

from bigbatch.advisor.sampled_steps import SampledSteps

FREE_SECONDS = 6.0  # of 2000 steps
SHARE = 0.05


def train(costs, plain, steps, pair=False, jitter=0.0):
    """Measured steps and seconds of measuring, by step, if a measured step takes so much more.

    Args:
        costs: of a measured step, as ratios; in turn.
        plain: seconds of another step.
        steps: how many.
        pair: whether two are measured together.
        jitter: relative, of every step.
    """
    draw = random.Random(0)
    samples, measured, extras = SampledSteps(math.inf, pair=pair), [], []
    for _ in range(steps):
        due, shared = samples.due, samples.shared
        cost = costs[len(measured) % len(costs)] if due else 0.0
        if due:
            measured.append(len(extras))
        seconds = plain * (1 + cost) * math.exp(draw.gauss(0, jitter))
        samples.end_step(seconds, shared if due else None, failed=False)
        extras.append(plain * cost)
    return measured, extras


@pytest.mark.parametrize("plain", [1e-3, 0.1])
@pytest.mark.parametrize("cost", [0.02, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_measuring_takes_its_share_and_six_seconds_of_2000_steps(plain, cost, pair, jitter):
    """10 % more than the share for the medians of times that jitter."""
    steps = 4000
    _, extras = train([cost], plain, steps, pair, jitter)
    # the first ones, until eight others are timed, and those of an interval that was chosen before
    begun = FREE_SECONDS * steps / 2000 + 24 * plain * cost
    seconds = plain * steps + sum(extras)
    assert sum(extras) <= begun + 1.1 * SHARE * seconds


@pytest.mark.parametrize("costs", [(0.2, 2.0), (2.0, 0.2), (0.0, 1.0)])
def test_the_steps_of_a_pair_may_cost_differently(costs):
    """The first only copies the gradient, the second compares."""
    plain, steps = 0.01, 6000
    _, extras = train(costs, plain, steps, pair=True)
    seconds = plain * (steps - 2000) + sum(extras[2000:])
    assert sum(extras[2000:]) <= SHARE * seconds + FREE_SECONDS * (steps - 2000) / 2000


def test_short_steps_are_measured_evenly():
    measured, _ = train([12.0], 0.001, 2000)  # a measured step takes 12 ms more: one in four
    assert 450 < len(measured) < 550
    assert {4} == {after - step for step, after in itertools.pairwise(measured[20:])}


def test_steps_that_cost_nothing_are_all_measured():
    measured, _ = train([0.0], 0.01, 200)
    assert list(range(100, 200)) == [step for step in measured if step >= 100]


def test_pairs_are_consecutive_steps():
    measured, _ = train([1.0], 0.01, 2000, pair=True)
    assert all(
        first + 1 == second for first, second in zip(measured[::2], measured[1::2], strict=True)
    )


def test_the_first_step_is_measured_and_the_second_is_not():
    assert [0, 2, 4] == train([5.0], 0.01, 6)[0]
    assert [0, 1, 4, 5] == train([5.0], 0.01, 8, pair=True)[0]


def test_ranks_with_the_same_sums_choose_the_same_steps():
    """Their own times differ by a factor of ten, and each passes its own values."""
    draw = random.Random(1)
    ranks = [SampledSteps(math.inf) for _ in range(3)]
    for _ in range(500):
        due = {rank.due for rank in ranks}
        assert 1 == len(due)
        shared = [sum(values) for values in zip(*(rank.shared for rank in ranks), strict=True)]
        for scale, rank in zip((1, 3, 10), ranks, strict=True):
            seconds = scale * draw.uniform(0.01, 0.02) * (2 if True in due else 1)
            rank.end_step(seconds, shared if True in due else None, failed=False)


def fail(samples, failures):
    """Measures a step for each failure, and others until the next is due."""
    for failed in failures:
        samples.end_step(0.01, samples.shared, failed=failed)
        while not samples.due:
            samples.end_step(0.01, None, failed=False)
    samples.end_step(0.01, samples.shared, failed=False)  # which tells of the last one
    return samples.failed


@pytest.mark.parametrize(
    ("failures", "expected"), [("", 0), ("x", 1), ("xxx", 3), ("xx-x", 1), ("xxx-", 0), ("-xx", 2)]
)
def test_failures_in_a_row_are_counted(failures, expected):
    assert expected == fail(SampledSteps(math.inf), [one == "x" for one in failures])


def test_a_failure_of_another_rank_counts():
    samples = SampledSteps(math.inf)
    samples.end_step(0.01, (2.0, 0.0, 0.0, 0.0, 1.0, 0.0), failed=False)
    assert 1 == samples.failed


@pytest.mark.parametrize(("elapsed", "expected"), [(9.0, False), (11.0, True)])
def test_the_time_is_over_when_the_mean_of_the_ranks_is(elapsed, expected):
    samples = SampledSteps(10.0)
    samples.end_step(0.01, (2.0, 0.0, 0.0, 2 * elapsed, 0.0, 0.0), failed=False)
    assert expected == samples.timed_out


def test_no_time_left_ends_at_the_first_measured_step():
    samples = SampledSteps(-1.0)
    assert not samples.timed_out
    samples.end_step(0.01, samples.shared, failed=False)
    assert samples.timed_out


def test_the_median_of_other_steps_is_the_time_of_a_step():
    samples = SampledSteps(math.inf)
    assert 0.0 == samples.seconds
    for seconds in (9.0, 0.02, 9.0, 0.0, 9.0, 0.03, 9.0, 0.04):
        samples.end_step(seconds, samples.shared if samples.due else None, failed=False)
    assert 0.03 == samples.seconds  # 0 is an unknown time
