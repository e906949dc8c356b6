"""Averages of signal and noise, over samples."""

import json
import math

import pytest
import torch

from bigbatch import GradientStatistics, NoiseAverage
from bigbatch.errors import SettingError


def step(signal, noise, samples=100, micro_batches=4):
    return GradientStatistics(signal, noise, samples, micro_batches)


def run(average, steps):
    return [average.update(one) for one in steps][-1]


def test_the_first_step_is_its_own_average():
    first = step(3.0, 60.0)
    actual = NoiseAverage(1e6).update(first)
    assert pytest.approx((3.0, 60.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_two_steps_are_weighted_by_their_age_in_samples():
    old = math.exp(-300 / 1000)  # what the second step, of 300 samples, leaves of the first
    first, second = (1 - math.exp(-100 / 1000)) * old, 1 - old
    actual = run(NoiseAverage(1000), [step(-1.0, 60.0), step(3.0, 20.0, samples=300)])
    total = first + second
    assert pytest.approx((3 * second - first) / total) == actual.grad_sqnorm
    assert pytest.approx((20 * second + 60 * first) / total) == actual.grad_variance


def test_a_constant_stays_itself_from_the_first_step_on():
    average = NoiseAverage(1000)
    for samples in (8, 4096, 100, 1):
        actual = average.update(step(2.0, 50.0, samples))
        assert pytest.approx((2.0, 50.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_the_window_is_as_many_samples_whatever_the_batch_size():
    whole = run(NoiseAverage(500), [step(1.0, 9.0), step(2.0, 5.0)])
    halves = [step(1.0, 9.0, samples=50)] * 2 + [step(2.0, 5.0, samples=50)] * 2
    parts = run(NoiseAverage(500), halves)
    assert pytest.approx((whole.grad_sqnorm, whole.grad_variance)) == (
        parts.grad_sqnorm,
        parts.grad_variance,
    )


def test_what_is_many_windows_old_is_forgotten():
    actual = run(NoiseAverage(100), [step(1e6, 1e6), *[step(1.0, 2.0)] * 50])
    assert pytest.approx((1.0, 2.0)) == (actual.grad_sqnorm, actual.grad_variance)


def test_samples_and_micro_batches_are_those_of_the_present_step():
    actual = run(NoiseAverage(1000), [step(1.0, 1.0), step(1.0, 1.0, 32, micro_batches=8)])
    assert (32, 8) == (actual.samples, actual.micro_batches)


def test_the_noise_scale_of_averages_is_right_where_that_of_steps_is_often_infinite():
    draws = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = [step(1.0 + 2.0 * draw, 50.0) for draw in draws.tolist()]
    infinite = sum(math.isinf(one.noise_scale) for one in steps)
    assert infinite > 500  # one in three
    # 2,000 steps in the window: the signal's standard error is about .05
    actual = run(NoiseAverage(200_000), steps)
    assert pytest.approx(50.0, rel=0.2) == actual.noise_scale


def test_the_similarity_of_an_average_stays_a_cosine_while_the_batch_grows():
    average = NoiseAverage(10_000)
    for samples in (8, 64, 512, 4096):
        actual = average.update(step(-8.0 / samples, 8.0, samples))  # phi = -1
        assert -1 <= actual.similarity <= 0


def test_a_saved_average_continues_as_if_it_had_never_stopped():
    steps = [step(1.0, 9.0), step(-2.0, 5.0, samples=7), step(4.0, 1.0, samples=300)]
    unbroken, before, after = (NoiseAverage(500) for _ in range(3))
    run(before, steps[:2])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert run(unbroken, steps) == run(after, steps[2:])


@pytest.mark.parametrize("window", [0, -1, math.nan, math.inf])
def test_a_window_that_is_no_number_of_window_is_refused(window):
    with pytest.raises(SettingError, match="window"):
        NoiseAverage(window)


def test_a_noise_too_faint_to_square_has_no_interval():
    average = NoiseAverage(100, confidence=0.9)
    for noise in (1e-216, 2e-216, 1e-216, 3e-216):
        found = average.update(GradientStatistics(noise, noise, samples=10, micro_batches=4))
    assert (-1.0, 1.0) == found.similarity_interval
