"""Noisy quadratics against trainings of every coordinate, and policies on them."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from studies import decisions
from studies.noisy_quadratic import NOISES, OPTIMIZERS, RATES, SPECTRA, Bed
from studies.optimal_schedule import optimal_schedule, with_best_rate


def bed(spectrum="two-scale", optimizer="sgd", rate="constant", **options):
    return replace(Bed(spectrum, optimizer, rate, 100.0, 0.1, 10.0), **options)


def fixed(size):
    return lambda at: np.full_like(at.samples, size)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_are_those_of_many_trainings_of_each_coordinate(optimizer):
    one = bed(optimizer=optimizer)
    generator, trainings = np.random.default_rng(0), 4000
    h = np.array([1.0, 0.02])[:, None]
    theta, velocity = np.ones((2, trainings)), np.zeros((2, trainings))
    moments = one.start(1)
    rates, sizes = [0.3, 0.1, 0.05, 0.2, 0.1], [8, 16, 64, 32, 8]
    for rate, size in zip(rates, sizes, strict=True):
        noise = generator.standard_normal((2, trainings)) * np.sqrt(10.0 * h / size)
        gradient = h * theta + noise
        velocity = (0.9 if optimizer == "momentum" else 0.0) * velocity + gradient
        theta = theta - rate * velocity * (h**-0.5 if optimizer == "preconditioned" else 1.0)
        one.step(moments, np.array([rate]), np.array([float(size)]))
    # a mean of 4,000 squares is known to 1 / sqrt(2,000) of itself: four of them
    np.testing.assert_allclose((theta**2).mean(1), moments[0, :, 0], rtol=4 / math.sqrt(2000))


def test_the_greedy_rate_lowers_the_expected_loss_most():
    one, size = bed("1/i", "preconditioned", "greedy"), np.array([48.0])
    moments = one.start(1)
    for _ in range(20):
        one.step(moments, one.greedy_rate(moments, size), size)
    best = one.greedy_rate(moments, size)
    losses = []
    for factor in (0.9, 1.0, 1.1):
        after = moments.copy()
        one.step(after, factor * best, size)
        losses.append(float(one.loss(after)[0]))
    assert losses[1] < min(losses[0], losses[2]) < float(one.loss(moments)[0])


def test_what_a_step_measures_has_the_distribution_of_its_micro_batches():
    one, generator = bed(), np.random.default_rng(1)
    moments = one.start(1)
    found = [one.measure(moments, 64, 4, generator) for _ in range(4000)]
    h = np.repeat([1.0, 0.02], [10, 1000])
    true = [float((h**2).sum()), float(10 * h.sum())]
    drawn = []
    for _ in range(4000):
        micro = h + generator.standard_normal((4, len(h))) * np.sqrt(10 * h / 16)
        spread = 16 * float(((micro - micro.mean(0)) ** 2).sum()) / 3
        drawn.append([float((micro.mean(0) ** 2).sum()) - spread / 64, spread])
    measured = np.array([[s.grad_sqnorm, s.grad_variance] for s in found])
    drawn = np.array(drawn)
    for n, value in enumerate(true):
        error = 4 * measured[:, n].std() / math.sqrt(4000)
        assert abs(measured[:, n].mean() - value) < error
        # the sd of 4,000 numbers is known to about 1.1 %, each of them
        assert measured[:, n].std() == pytest.approx(drawn[:, n].std(), rel=0.08)
    assert np.corrcoef(measured.T)[0, 1] == pytest.approx(np.corrcoef(drawn.T)[0, 1], abs=0.08)


def test_the_harmonic_spectrum_has_a_thousand_coordinates_and_its_own_sums():
    spectrum, values = SPECTRA["1/i"], 1 / np.arange(1, 1001)
    assert spectrum.counts.sum() == 1000
    assert spectrum.counts @ spectrum.curvatures == pytest.approx(values.sum())
    assert spectrum.counts @ spectrum.curvatures**2 == pytest.approx((values**2).sum(), rel=0.01)


def test_without_noise_a_flat_quadratic_needs_one_greedy_step():
    one = bed("flat", rate="greedy", noise=1e-9)
    outcome = with_best_rate(one, fixed(8.0))
    assert outcome.steps < 1
    assert outcome.samples == pytest.approx(8 * outcome.steps)
    assert outcome.time == pytest.approx(108 * outcome.steps)


def test_a_training_that_diverges_or_takes_too_long_has_no_time():
    log_rates = np.log([[0.1, 1.0], [30.0, 1.0], [1e-5, 1.0]])
    times, *_ = bed().run(fixed(64.0), log_rates)
    assert np.isfinite(times).tolist() == [True, False, False]
    assert not np.isfinite(bed().run(fixed(64.0), log_rates[:1], limit=times[0] / 2)).any()


def test_the_best_rate_is_that_of_a_dense_grid():
    one = bed("1/i", rate="constant", noise=4.0)
    grid = np.log(np.stack([np.geomspace(1e-3, 2, 400), np.ones(400)], 1))
    assert with_best_rate(one, fixed(64.0)).time <= one.run(fixed(64.0), grid)[0].min() * 1.001


def test_batches_change_by_no_more_than_they_may():
    one = bed(rate="greedy", noise=100.0)
    log_rates = np.zeros((1, 2))
    free, slow = (one.run(fixed(4096.0), log_rates, max_change=f)[:, 0] for f in (math.inf, 1.1))
    assert slow[2] > free[2]  # more steps, the first ones small
    assert slow[1] / slow[2] < free[1] / free[2] == pytest.approx(4096)


@pytest.mark.parametrize("rate", RATES)
def test_the_optimal_schedule_is_no_slower_than_what_it_began_with(rate):
    one = bed("two-scale", rate=rate, noise=20.0)
    start = with_best_rate(one, fixed(128.0))
    best = optimal_schedule(one, np.full(6, math.log(128.0)), start, seed=0)
    assert best.time < 0.99 * start.time


def test_beds_of_a_rate_and_noise_have_every_spectrum_and_optimizer():
    for rate, noise in itertools.product(RATES, NOISES):
        beds = decisions.beds(rate, noise)
        kinds = {(one.spectrum, one.optimizer) for one in beds}
        flat = {("flat", name) for name in OPTIMIZERS}  # its noise has one shape
        left_out = {("flat", "preconditioned")} if noise == "proportional" else flat
        assert set(itertools.product(SPECTRA, OPTIMIZERS)) - left_out == kinds
        assert {10, 1000, 10_000} == {one.overhead for one in beds}
        assert len(kinds) + 2 == len(set(map(str, beds)))


def test_noise_is_proportional_to_curvature_or_the_same_in_every_coordinate():
    h = SPECTRA["1/i"].curvatures
    np.testing.assert_array_equal(10 * h, bed("1/i").variances)
    np.testing.assert_array_equal(
        10 * np.ones_like(h), bed("1/i", noise_shape="isotropic").variances
    )


@pytest.mark.parametrize(
    ("noise", "spectrum", "factor"),
    [
        ("proportional", "flat", 1),
        ("proportional", "1/i", 3.3),
        ("isotropic", "1/i", 98),
        ("isotropic", "two-scale", 32),
    ],
)
def test_b_simple_is_so_many_times_the_critical_batch_of_the_start(noise, spectrum, factor):
    one = bed(spectrum, noise_shape=noise)
    h, moments = one.curvatures, one.start(1)
    # McCandlish et al. 2018 (1812.06162), 2.2: tr(H Sigma) / (G'HG) with G = h
    critical = (one.counts @ (h * one.variances)) / (one.counts @ h**3)
    assert (
        pytest.approx(factor, rel=0.02) == one.grad_variance / one.grad_sqnorm(moments) / critical
    )


def test_with_isotropic_noise_policies_of_the_noise_scale_lose_to_a_fixed_batch():
    one = decisions.beds("greedy", "isotropic")[1]  # 1/i, SGD
    times = {found.arm: max(found.times) for found in decisions.compare(one, seeds=1)}
    assert times[decisions.FIXED.name] < 0.1
    assert times["Goodput, overhead given"] > 0.8
    assert times["SimiGrad(0.2)"] > 4


@pytest.fixture(scope="module")
def regrets():
    small = replace(decisions.beds("greedy", "proportional")[7], noise=30.0)  # two-scale, SGD
    return decisions.compare(small, seed=0, seeds=2)


def test_goodput_is_near_the_best_schedule_and_a_multiple_of_one_is_not(regrets):
    times = {one.arm: max(one.times) for one in regrets}
    assert times["Goodput, overhead given"] < 0.1
    assert times["Goodput"] < 0.1
    assert times["NoiseScale(1)"] > times["NoiseScale, best in hindsight"]


def test_no_policy_beats_the_best_schedule(regrets):
    assert min(min(one.times) for one in regrets) > -0.01  # its six knots are no optimum to 0
    expected = [arm.name for arm in decisions.ARMS if not arm.follows_decay]
    assert [one.arm for one in regrets] == [decisions.FIXED.name, *expected]


def test_the_table_has_every_policy(regrets):
    rows = list(decisions.summary(regrets))
    assert len(rows) == len(regrets)
    assert all("%" in row["median regret"] for row in rows)


def test_a_simulation_is_the_same_again(regrets):
    again = decisions.compare(regrets[0].bed, seed=0, seeds=2)
    assert [one.times for one in regrets] == [one.times for one in again]


def test_policies_that_follow_the_decay_are_on_beds_with_one(regrets):
    small = replace(decisions.beds("decaying", "proportional")[7], noise=30.0)
    decaying = decisions.compare(small, seed=0, seeds=1)
    times = {one.arm: one.times for one in decaying}
    assert times.keys() == {arm.name for arm in (decisions.FIXED, *decisions.ARMS)}
    assert 0 <= max(times["Seesaw"]) < 1
    both = [*regrets, *decaying]
    assert len(both) == len(list(decisions.summary(both)))
