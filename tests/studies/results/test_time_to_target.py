"""Times to a target against slow sums, and runs that never reach it."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import RunError
from bigbatch.log.history import History
from bigbatch.log.paired_differences import paired_difference
from bigbatch.log.time_to_score import time_to_score
from log_rows import row
from made_runs import COST, SCORE, fresh, log_of, tuning
from property_tests import property_test
from studies.results.batch_tables import TargetTimes, fastest, times_to, to_target, tuned_score
from studies.results.step_cost import StepCost


@given(
    st.lists(st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 5)))),
    st.integers(0, 5),
    st.booleans(),
)
@property_test(100)
def test_a_curve_reaches_a_target_where_the_log_does(made, target, higher):
    """The slow oracle counts updates and samples row by row."""
    rows = [
        row(step, skipped=skipped, metrics=None if score is None else {SCORE: float(score)})
        for step, (skipped, score) in enumerate(made, start=1)
    ]
    expected = None
    for end, (_, score) in enumerate(made, start=1):
        is_better = score is not None and (score == target or (score > target) == higher)
        if expected is None and is_better:
            expected = sum(not skipped for skipped, _ in made[:end]), 32 * end
    curve, steps = [], 0
    for end, (skipped, score) in enumerate(made, start=1):
        steps += not skipped
        curve += [] if score is None else [(32 * end, steps, 0.0, float(score))]
    run = fresh("a", 0, curve=tuple(curve))
    assert expected == to_target(run, target, higher_is_better=higher)
    time = time_to_score(History(None, {}, rows), target, higher_is_better=higher)
    assert expected == (time and (time.steps, time.samples))


def test_a_diverged_or_failed_run_reaches_nothing():
    assert (10, 640) == to_target(fresh("a", 0), 90, higher_is_better=True)
    assert to_target(fresh("a", 0, diverged=True), 90, higher_is_better=True) is None
    failed = replace(fresh("a", 0, curve=()), failure="killed")
    assert to_target(failed, 90, higher_is_better=True) is None


def test_the_modelled_time_is_that_of_every_step_one_after_another():
    cost = StepCost(fixed=2e-3, per_sample=1e-5, gradient_bytes=10**6)
    for devices in (1, 8, 64):
        bytes_sent = 2 * (devices - 1) * (10**6 / devices)  # a ring's parts
        latency = {1: 0, 8: 6, 64: 12}[devices] * 30e-6  # up and down a binary tree
        reduced = bytes_sent / 12.5e9 + latency
        one_by_one = sum(2e-3 + reduced + size * 1e-5 / devices for size in (64, 128, 256))
        assert pytest.approx(one_by_one) == cost.seconds(3, 448, devices)
        assert pytest.approx(cost.overhead(devices)) == (2e-3 + reduced) * devices / 1e-5


@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0], [3.0, None, 1.0], [1.0, None], [None, None], [1, 2, None, None]]
)
def test_the_median_has_infinity_for_runs_that_never_reach_it(values):
    times = TargetTimes(dict(enumerate(values)))
    assert median(math.inf if one is None else one for one in values) == times.median
    assert sum(one is not None for one in values) == times.reached


def test_ratios_are_paired_and_pairs_that_lack_a_time_are_counted():
    one = TargetTimes({0: 2.0, 1: 4.0, 2: None, 3: 1.0})
    other = TargetTimes({0: 1.0, 1: 1.0, 2: 1.0, 3: None})
    ratio = paired_difference(one.logs, other.logs)
    assert (4, 2) == (ratio.pairs, ratio.missing)
    assert pytest.approx(math.log(math.sqrt(8))) == ratio.center


def arm(name, *reached_at):
    return [fresh(name, seed, reached_at=step) for seed, step in enumerate(reached_at)]


def test_the_fastest_has_the_least_median():
    log = log_of(
        *arm("fixed 1", 20, 20, 20), *arm("fixed 2", 90, 10, 10), *arm("fixed 3", None, None, 1)
    )
    assert "fixed 2" == fastest(log, 90, 1)
    times = times_to(log, "fixed 2", 90, 1)
    assert pytest.approx(COST.seconds(10, 640, 1)) == times.median


def test_where_half_of_all_runs_never_reach_it_the_fastest_reaches_it_most_often():
    none = arm("fixed 1", None, None, None)
    assert "fixed 2" == fastest(log_of(*none, *arm("fixed 2", None, 99, None)), 90, 8)
    assert "fixed 1" == fastest(log_of(*none), 90, 8)


def test_the_tuned_score_is_that_of_the_chosen_rate_without_failures():
    runs = [tuning("a", 1000 + n, score, lr=0.1) for n, score in enumerate((80.0, 82.0, None))]
    bad = replace(tuning("a", 1003, 0.0), diverged=True)
    loss = replace(tuning("a", 1004), scores={"held-out accuracy, %": 84.0, "loss": 0.1})
    log = log_of(fresh("a", 0), *runs, bad, loss, tuning("a", lr=0.2, score=99.0))
    assert 82.0 == tuned_score(log, "a")
    with pytest.raises(RunError, match="no tuning run of a has a score"):
        tuned_score(log_of(fresh("a", 0), runs[2]), "a")


def test_seconds_rise_with_steps_and_fall_with_devices():
    seconds = [COST.seconds(100, 1e6, devices) for devices in (1, 8, 64)]
    assert all(more > fewer for more, fewer in pairwise(seconds))
