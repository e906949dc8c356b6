"""How losses of two runs are compared, against curves whose gain is known."""

from dataclasses import replace

import numpy as np
import pytest

from bigbatch.advisor.loss_curve import LossCurve, gain, rates_follow

SAMPLES = 20_000


def curve(batch, step_seconds, samples_factor=1.0, noise=0.0, floor=0.0, seed=0):
    """loss = 2 exp(-samples / 8000 / factor), with noise of 1 / sqrt(batch)."""
    steps = SAMPLES // batch
    samples = batch * np.arange(1.0, steps + 1)
    random = np.random.default_rng(seed).normal(size=steps) * noise / np.sqrt(batch)
    losses = 2 * np.exp(-samples / 8000 / samples_factor) + random + floor
    seconds = step_seconds * np.arange(1.0, steps + 1)
    return LossCurve(batch, 0, seconds, samples, losses, np.full(steps, 0.1))


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_the_gain_of_a_known_curve(factor):
    found = gain(curve(16, 0.001), curve(64, 0.002, factor))
    # windows of 500 samples, whose mean of a convex loss is the same in both
    assert factor == pytest.approx(found.samples, rel=0.01)
    assert factor * 0.002 / 64 / (0.001 / 16) == pytest.approx(found.time, rel=0.01)


def test_the_gain_is_one_over_that_of_the_other_direction():
    one, other = curve(16, 0.001, noise=0.3), curve(32, 0.0015, 1.2, noise=0.3)
    forth, back = gain(one, other), gain(other, one)
    assert 1 == pytest.approx(forth.time * back.time)
    assert 1 == pytest.approx(forth.samples * back.samples)


def test_noise_has_no_bias_on_average():
    found = [
        gain(curve(8, 0.001, noise=1, seed=i), curve(64, 0.002, 1.3, noise=1, seed=20 + i))
        for i in range(20)
    ]
    logs = np.log([one.samples for one in found])
    error = logs.std() / np.sqrt(len(logs))
    assert abs(logs.mean() - np.log(1.3)) < 4 * error < 0.1


def test_a_loss_that_only_fluctuates_has_no_gain():
    flat = [curve(16, 0.001, 1e9, noise=1.0, seed=seed) for seed in range(2)]
    assert "did not fall" in gain(*flat)


def test_a_loss_that_rises_has_no_gain():
    assert "did not fall" in gain(curve(16, 0.001), curve(16, 0.001, -1.0))


@pytest.mark.parametrize("tried", [4, 64])
def test_a_sum_over_samples_has_no_gain(tried):
    present, other = curve(16, 0.001, noise=0.3), curve(tried, 0.002, noise=0.3)
    summed = replace(other, losses=other.losses * tried / 16)
    assert "sum over samples" in gain(present, summed)
    assert "sum over samples" not in str(gain(present, other))


def test_a_loss_that_is_not_finite_has_no_gain():
    assert "not finite" in gain(curve(16, 0.001), curve(16, 0.001, floor=np.nan))


def test_few_steps_have_no_gain():
    assert "too few steps" in gain(curve(16, 0.001), curve(2000, 0.001))


def test_curves_without_a_common_loss_have_no_gain():
    assert "no loss in common" in gain(curve(16, 0.001), curve(16, 0.001, floor=3.0))


def test_losses_that_no_longer_fall_are_compared_where_they_fell():
    def early(batch, factor, seed):
        return curve(batch, 0.001, factor / 5, noise=0.3, floor=0.2, seed=seed)

    found = [gain(early(16, 1.0, i), early(64, 1.3, 50 + i)).samples for i in range(20)]
    assert 1.3 == pytest.approx(np.median(found), rel=0.05)
    assert 1.1 < min(found) <= max(found) < 1.5
    one, steps = curve(500, 0.001), np.arange(40)
    short = replace(one, losses=np.maximum(1 - steps / 16, 0.2) + steps / 1000)
    assert "fell early" in gain(short, short)


def test_a_fast_start_is_no_sum_over_samples():
    present, other = curve(4, 0.001), curve(64, 0.002)
    fast = replace(present, losses=np.exp(-present.samples / 200) + present.losses / 10)
    slow = replace(other, losses=np.exp(-other.samples / 1600) + other.losses / 10)
    assert "sum over samples" not in str(gain(fast, slow))


def test_rates_that_follow_steps_do_not_follow_samples():
    present, tried = curve(16, 0.001), curve(64, 0.002)

    def scheduled(one, factor, last):
        return replace(one, rates=factor * np.linspace(0.1, 0, last)[: len(one.rates)])

    per_epoch = scheduled(present, 1.0, len(present.rates))
    assert rates_follow(per_epoch, scheduled(tried, 2.0, len(tried.rates)), 2.0)
    assert not rates_follow(per_epoch, scheduled(tried, 2.0, len(present.rates)), 2.0)
    assert rates_follow(present, replace(tried, rates=np.full(len(tried.rates), np.nan)), 2.0)
