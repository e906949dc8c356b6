"""Goodput against the least time per progress, found by trying all sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import Controller, Goodput, GradientStatistics, Shadow, TrainingState
from bigbatch.errors import SettingError
from bigbatch.policies.parse import parse_policy
from bigbatch.policies.step_time import StepTimes
from property_tests import property_test


def noise(scale, samples=64):
    return GradientStatistics(1.0, scale, samples=samples, micro_batches=8)


def timed(*sizes, fixed=1.0, per_sample=0.001):
    times = StepTimes()
    for size in sizes:
        for _ in range(5):
            times.add(size, fixed + per_sample * size)
    return times.sizes


def now(present=64, **options):
    return TrainingState(present, present, **options)


@property_test(50)
@given(fixed=st.floats(1e-3, 10), per_sample=st.floats(1e-5, 0.1), scale=st.floats(10, 1e5))
def test_no_other_size_takes_less_time_for_its_progress(fixed, per_sample, scale):
    def time(size):
        return (fixed + per_sample * size) * (1 + scale / size)

    best = Goodput(overhead=fixed / per_sample).decide(noise(scale), now()).batch_size
    sizes = [best * factor for factor in (0.25, 0.5, 0.9, 1.1, 2, 4)]
    assert all(time(max(best, 1)) <= time(max(size, 1)) * (1 + 1e-3) for size in sizes if best > 50)
    assert abs(best - math.sqrt(max(fixed / per_sample, 1) * scale)) <= 0.5 + 1e-9 * best


def test_the_overhead_is_that_of_the_timed_steps():
    decision = Goodput().decide(noise(1600.0), now(step_times=timed(512, 1024)))
    assert (1265, "sqrt(1000 x noise scale 1600)") == (decision.batch_size, decision.reason)
    assert not decision.trial


@pytest.mark.parametrize(("scale", "expected"), [(1e6, 2048), (1.0, 256), (math.inf, 2048)])
def test_it_goes_at_most_twice_as_far_as_was_timed(scale, expected):
    statistics = GradientStatistics(1.0 if math.isfinite(scale) else -1.0, min(scale, 9.0), 64, 8)
    statistics = noise(scale) if math.isfinite(scale) else statistics
    decision = Goodput().decide(statistics, now(step_times=timed(512, 1024)))
    assert expected == decision.batch_size
    assert "at most x2 beyond the timed sizes" in decision.reason


def test_a_time_that_does_not_grow_with_the_batch_lets_it_grow():
    flat = timed(64, 128, per_sample=0.0)
    assert 256 == Goodput().decide(noise(100.0), now(step_times=flat)).batch_size


@pytest.mark.parametrize(
    ("options", "sizes", "expected"),
    [
        ({}, (), 64),  # nothing is known: the present size
        ({}, (64,), 128),
        ({}, (64, 80), 128),  # too near each other
        ({"max_batch": 100}, (64,), 32),
        ({"max_batch": 100, "min_batch": 50}, (64,), 64),
    ],
)
def test_until_two_sizes_are_timed_it_tries_them_and_says_so(options, sizes, expected):
    decision = Goodput(**options).decide(noise(1e6), now(step_times=timed(*sizes)))
    assert (expected, True) == (decision.batch_size, decision.trial)
    assert "is needed" in decision.reason
    assert "pass overhead=" in decision.reason
    by_controller = Goodput().decide(noise(1e6), now(step_times=timed(*sizes), **options))
    assert (expected, True) == (by_controller.batch_size, by_controller.trial)


def test_a_trial_is_no_advice():
    decision = Shadow(Goodput()).decide(noise(900.0), now(step_times=timed(64)))
    assert (64, None) == (decision.batch_size, decision.advice)
    assert decision.reason.startswith("no advice: the time of a step of 128 is needed")
    known = Shadow(Goodput(overhead=400)).decide(noise(900.0), now())
    assert (64, 600) == (known.batch_size, known.advice)


def test_it_grows_only_while_the_loss_falls():
    policy = Goodput(overhead=400)
    for trend, expected in [(None, 600), (1.0, 600), (0.9, 64), (-3.0, 64)]:
        decision = policy.decide(noise(900.0), now(loss_trend=trend))
        assert expected == decision.batch_size
        assert (expected == 64) == ("held: the loss falls no more" in decision.reason)
    assert 600 == policy.decide(noise(900.0), now(5000, loss_trend=-3.0)).batch_size  # it shrinks


def test_bounds_hold_and_nothing_measured_changes_nothing():
    policy = Goodput(overhead=400, min_batch=100, max_batch=500)
    assert [100, 500] == [policy.decide(noise(s), now()).batch_size for s in (1.0, 1e9)]
    nothing = GradientStatistics(0.0, 0.0, samples=64, micro_batches=8)
    assert 300 == policy.decide(nothing, now(300)).batch_size
    no_signal = GradientStatistics(-1.0, 9.0, samples=64, micro_batches=8)
    assert 500 == policy.decide(no_signal, now(300)).batch_size
    assert 300 == Goodput(overhead=400).decide(no_signal, now(300)).batch_size


def test_a_controller_moves_it_by_a_tenth_a_step_and_by_averages():
    controller = Controller(Goodput(overhead=400), 64)
    sizes = [controller.next(noise(900.0)).batch_size for _ in range(40)]
    assert [64, 64, 64, 70, 77] == sizes[:5]
    assert 600 == sizes[-1]


def test_wrong_settings_are_refused():
    for wrong in ({"overhead": 0}, {"overhead": math.inf}, {"min_batch": 9, "max_batch": 8}):
        with pytest.raises(SettingError):
            Goodput(**wrong)
    assert Goodput(overhead=500.0, max_batch=64) == parse_policy("goodput:500,max_batch=64")
