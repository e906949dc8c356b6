"""Whether the loss falls, against the same windows written out."""

import math
import random

import pytest

from bigbatch.policies.goodput import LossTrend


def trend(losses, samples=64):
    found = LossTrend()
    for loss in losses:
        found.add(samples, loss)
    return found.trend


def noisy(mean, steps, seed, sd=0.1):
    generator = random.Random(seed)
    return [mean(step / steps) + sd * generator.gauss(0, 1) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_loss_falls_and_a_rising_one_does_not(seed):
    assert trend(noisy(lambda t: 1 - t, 400, seed)) > 5
    assert trend(noisy(lambda t: 1 + t, 400, seed)) < -5


def test_a_loss_that_stands_has_a_trend_of_order_one():
    trends = [trend(noisy(lambda t: 1.0, 400, seed)) for seed in range(40)]
    assert abs(sum(trends) / 40) < 3.5 / math.sqrt(40)  # mean of 40 numbers like Student's t
    assert 0.7 < math.sqrt(sum(t * t for t in trends) / 40) < 1.6


def test_up_to_64_steps_each_is_a_part_of_its_own():
    losses = noisy(lambda t: 1 - t, 60, seed=1)
    later, earlier = losses[42:], losses[24:42]  # 30 % each

    def square(values):
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)

    difference = sum(earlier) / 18 - sum(later) / 18
    expected = difference / math.sqrt(square(later) + square(earlier))
    assert pytest.approx(expected) == trend(losses)


def test_longer_trainings_are_kept_in_64_parts_at_most():
    found = LossTrend()
    for step in range(5000):
        found.add(64, 1 / (1 + step))
        assert len(found.state()["parts"]) <= 64
    assert sum(samples for samples, _ in found.state()["parts"]) == 5000 * 64
    assert found.trend > 3


def test_it_is_unknown_at_first_and_without_noise_it_is_sure():
    assert trend([1.0] * 20) is None
    assert 0.0 == trend([1.0] * 60)
    assert math.inf == trend([2.0] * 42 + [1.0] * 18)


def test_steps_without_a_finite_loss_are_left_out():
    losses = noisy(lambda t: 1 - t, 60, seed=3)
    assert trend(losses) == trend([*losses[:30], math.nan, math.inf, *losses[30:]])


def test_a_saved_trend_continues():
    losses = noisy(lambda t: 1 - t, 300, seed=2)
    first, second = LossTrend(), LossTrend()
    for loss in losses[:170]:
        first.add(48, loss)
    second.load(first.state())
    for loss in losses[170:]:
        first.add(48, loss)
        second.add(48, loss)
    assert first.trend == second.trend
