"""Trainings record the estimate and the truth of the same weights, and follow the truth."""

from dataclasses import replace

import pytest
import torch

from bigbatch import Fixed, Goodput, GradientStatistics, NoiseScale, SimiGrad
from made_records import made_record
from real_data import FOLDER, needs
from studies.results.exact_gradients import exact_statistics
from studies.results.tracked_training import (
    EVERY,
    Arm,
    Tracked,
    Training,
    Truth,
    averaged,
    mean_statistics,
    read_samples,
    train_tracked,
)

FIXED = Fixed(128)


@pytest.fixture(scope="module")
def digits():
    return read_samples(None).first(512)


def made(arm, signals, noise=100.0, every=1):
    """A training whose truth has these signals."""
    statistics = [GradientStatistics(signal, noise, 64, 64) for signal in signals]
    steps = list(range(0, every * len(signals), every))
    records = [made_record(64, 5.0 - 0.01 * n) for n in range(steps[-1] + 1)]
    return Tracked(arm, records, Truth(steps, statistics, [0.1] * len(steps)))


def test_every_way_to_measure_sees_the_same_training(digits):
    first = train_tracked(digits, 1024, 3, Arm(FIXED, 2))
    for arm in (Arm(FIXED, 16), Arm(FIXED, 8, by_groups=True)):
        other = train_tracked(digits, 1024, 3, arm, first.truth)
        assert first.batch_sizes == other.batch_sizes == [128] * 8
        losses = [[one.loss for one in run.records] for run in (first, other)]
        assert pytest.approx(losses[0], rel=1e-9) == losses[1]
        assert [arm.micro_batches] * 8 == [one.micro_batches for one in other.estimates]
    assert "Fixed, 8 groups" == arm.name


def test_the_truth_is_that_of_the_weights_before_the_step(digits):
    tracked = train_tracked(digits, 512, 3, Arm(FIXED, 4))
    training = Training(digits, 512, 3, Arm(FIXED, 4))
    expected = [
        exact_statistics(training.network, digits.inputs, digits.labels)[0]
        for number in training.states()
        if number % EVERY == 0
    ]
    assert [0, 2] == tracked.truth.steps
    assert expected == tracked.truth.statistics


def test_truth_between_two_measured_steps_lies_between(digits):
    tracked = made(Arm(FIXED, 4), [1.0, 3.0, 2.0], every=2)
    assert [1.0, 2.0, 3.0, 2.5, 2.0] == [one.grad_sqnorm for one in tracked.exact()]


def test_the_truth_without_delay_is_the_mean_of_the_steps_around(digits):
    tracked = made(Arm(FIXED, 4), [float(n) for n in range(60)])
    centered = [one.grad_sqnorm for one in tracked.centered()]
    assert pytest.approx([8.0, 30.0, 51.0]) == [centered[0], centered[30], centered[59]]


def test_a_mean_weighs_a_step_by_its_samples():
    one, other = GradientStatistics(1.0, 4.0, 30, 4), GradientStatistics(5.0, 8.0, 10, 4)
    mean = mean_statistics([one, other])
    assert (2.0, 5.0) == (mean.grad_sqnorm, mean.grad_variance)


@pytest.mark.parametrize(
    ("policy", "fixed_point"), [(SimiGrad(0.2), 100), (NoiseScale(1.0), 200), (Goodput(800.0), 400)]
)
@pytest.mark.parametrize("averages", [False, True])
def test_a_policy_that_is_given_the_truth_goes_to_its_fixed_point(policy, fixed_point, averages):
    tracked = made(Arm(policy, 4, "16 steps"), [0.5] * 80)  # B_simple = 200
    sizes = tracked.followed(tracked.exact(), averages=averages)
    assert 64 == sizes[0]
    # SimiGrad oscillates by a tenth
    assert pytest.approx(fixed_point, rel=0.11) == sizes[-1]


def test_goodput_is_held_where_the_training_was():
    signals = [20.0] * 50 + [0.5] * 30  # its batch is 63, then 400
    falls = made(Arm(Goodput(800.0), 4), signals)
    rising = [replace(one, loss=1 / one.loss) for one in falls.records]
    rises = replace(falls, records=rising)
    assert 400 == falls.followed(falls.exact(), averages=False)[-1]
    assert 63 == rises.followed(rises.exact(), averages=False)[-1]


def test_following_the_own_estimates_repeats_the_training(digits):
    tracked = train_tracked(digits.first(512), 512, 5, Arm(NoiseScale(), 2, "16 steps"))
    followed = tracked.followed(tracked.estimates)
    assert len(set(followed)) > 2
    assert pytest.approx(tracked.decided, abs=2) == followed  # steps are rounded to micro-batches


def test_averages_are_those_of_the_controller():
    steps = [GradientStatistics(float(n % 3), 10.0, 64, 4) for n in range(40)]
    window = averaged(steps, "16 steps")
    assert pytest.approx(1.0, abs=0.05) == window[-1].grad_sqnorm
    assert pytest.approx(1.0, abs=0.05) == averaged(steps, "auto")[-1].grad_sqnorm
    assert 0.0 == window[0].grad_sqnorm


def test_a_training_leaves_the_random_state_of_torch(digits):
    before = torch.get_rng_state()
    Training(digits, 512, 3, Arm(FIXED, 4))
    assert torch.equal(before, torch.get_rng_state())


@needs("fashion-mnist")
def test_fashion_mnist_is_read_in_order_with_mean_0_and_deviation_1():
    samples = read_samples(FOLDER)
    assert ((60_000, 784), torch.float64) == (samples.inputs.shape, samples.inputs.dtype)
    assert [9, 0, 0, 3] == samples.labels[:4].tolist()  # as published
    assert pytest.approx((0.0, 1.0), abs=2e-3) == (
        float(samples.inputs.mean()),
        float(samples.inputs.std()),
    )
