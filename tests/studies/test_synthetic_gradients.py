"""The populations that intervals are judged by: is what they say of themselves true?"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import GradientMeter
from oracles import noise as noise_oracle
from oracles import populations as oracle
from studies.synthetic_gradients import (
    Elliptical,
    Recorded,
    measure_step,
    network,
    per_sample_gradients,
    populations,
    recorded_stages,
    spectrum,
    synthetic,
)

torch.set_num_threads(1)  # small tensors: a second thread only waits
SHAPES = [(2, 2), (3,)]
SIGMAS = 5  # of the estimate itself; by chance a seed fails one check in two million


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def small(freedom=None, *, seed):
    """Twelve elements with variances 1 to 12."""
    mean = torch.linspace(-1, 1, 12)
    return Elliptical("small", mean, torch.arange(1.0, 13), freedom, seeded(seed))


def rows(count, *, seed):
    """Gradients of `count` samples with 7 elements, skewed, around 0.5 to 3.5."""
    exponential = torch.rand(count, 7, generator=seeded(seed)).log().neg()
    return (exponential - 1) * torch.arange(1.0, 8) + torch.arange(1.0, 8) / 2


def recorded_population(count, *, seed):
    return Recorded("recorded", rows(count, seed=seed), SHAPES, seeded(seed + 1))


def drawn(population, sizes, times):
    """Micro-batch mean gradients of many steps, (times, k, P)."""
    return torch.stack([population.gradients(sizes) for _ in range(times)]).double()


def within(expected, values):
    """Whether the mean of `values` (T, ...) is the expected one, by their own standard error."""
    error = values.std(0) / math.sqrt(len(values))
    return bool(((values.mean(0) - expected).abs() <= SIGMAS * error).all())


# what is stated


@pytest.mark.parametrize("freedom", [None, 3])
def test_what_is_made_up_has_the_noise_scale_and_effective_dimension_promised(freedom):
    population = synthetic("made up", freedom, seed=0)
    # 20,000 float32 are summed: their rounding, 6e-8 each, adds up to less than 1e-5
    assert pytest.approx((1.0, 1e-3, 1000), rel=1e-5) == (
        population.grad_variance,
        population.grad_sqnorm,
        population.noise_scale,
    )
    assert pytest.approx(population.grad_sqnorm, rel=1e-5) == float(
        population.mean @ population.mean
    )
    eigenvalues = spectrum(20_000, 100)
    effective = eigenvalues.double().sum() ** 2 / eigenvalues.double().square().sum()
    assert pytest.approx(100, rel=1e-5) == float(effective)


def test_the_truth_of_recorded_gradients_is_that_of_all_of_them_one_by_one():
    gradients = rows(1203, seed=1)  # more than one chunk of 500, and no whole number of them
    population = Recorded("recorded", gradients, SHAPES, seeded(2))
    expected = oracle.truth(gradients)
    # the sums are float64 on both sides
    actual = (population.grad_sqnorm, population.grad_variance)
    assert pytest.approx((expected.grad_sqnorm, expected.grad_variance), rel=1e-6) == actual
    assert (
        pytest.approx(expected.grad_variance / expected.grad_sqnorm, rel=1e-6)
        == population.noise_scale
    )


def test_the_made_up_mean_leans_to_the_noisy_elements_and_lies_in_all():
    population = synthetic("made up", None, seed=0)
    variances = (population.gradients([1] * 100) - population.mean).square().mean(0)
    noisy = variances.argsort(descending=True)[:100]
    roots = spectrum(20_000, 100).sqrt()
    expected = float(roots[:100].sum() / roots.sum())
    share = float(population.mean[noisy].square().sum()) / population.grad_sqnorm
    # a sum of 100 squared normals of unequal weight scatters by some 15 %; it also finds those
    # 100 elements from 100 draws only nearly
    assert 0.01 < expected < 0.5
    assert pytest.approx(expected, rel=0.5) == share


@given(st.floats(0.01, 0.99), st.floats(0.1, 10))
def test_the_samples_for_a_similarity_have_it_and_the_pull_acts_as_samples_do(phi, pull):
    population = small(seed=0)
    samples = population.samples_for(phi)
    assert pytest.approx(phi) == population.similarity(samples)
    assert pytest.approx(phi) == population.similarity(samples / pull, pull)
    noise, signal = population.grad_variance, population.grad_sqnorm
    assert pytest.approx(signal / (signal + 2 * noise / samples)) == population.similarity(samples)


# what is drawn


@pytest.mark.thorough
@pytest.mark.parametrize(
    "population",
    [small(seed=3), small(5, seed=4), recorded_population(30, seed=5)],
    ids=["normal", "t", "kept"],
)
def test_micro_batches_have_the_mean_and_the_noise_of_their_size(population):
    sizes = [1, 4, 30]
    g = drawn(population, sizes, 6000)
    mean = population.mean.double()
    assert within(mean, g)
    squares = (g - mean).square().sum(2)  # recorded ones at n = 30 = M: with replacement
    assert within(population.grad_variance / torch.tensor(sizes), squares)


def test_every_element_has_its_own_variance():
    population = small(seed=6)
    g = drawn(population, [2], 6000)[:, 0]
    assert within(torch.arange(1.0, 13) / 2, (g - population.mean).square())


def test_elements_of_recorded_gradients_vary_together_as_the_samples_do():
    gradients = rows(25, seed=7)
    gradients[:, 1] = -2 * gradients[:, 0]
    population = Recorded("recorded", gradients, SHAPES, seeded(8))
    g = drawn(population, [3], 50)[:, 0]
    # means of three rows are linear in them, up to the rounding of float32
    assert torch.allclose(-2 * g[:, 0], g[:, 1], atol=1e-5)


@pytest.mark.thorough
def test_micro_batches_of_a_step_are_independent():
    for population in (small(5, seed=9), recorded_population(30, seed=10)):
        deviations = drawn(population, [2, 2], 6000) - population.mean
        assert within(torch.tensor(0.0), (deviations[:, 0] * deviations[:, 1]).sum(1))


@pytest.mark.parametrize("freedom", [3, None])
@pytest.mark.parametrize("size", [1, 6])
def test_one_normal_a_micro_batch_stands_for_all_its_samples(freedom, size):
    population = small(freedom, seed=11)
    expected = oracle.elliptical(
        population.mean, torch.arange(1.0, 13), freedom, size, times=4000, seed=12
    )
    # f = 3: |g|^2 has no variance, so whole distributions are compared (Kolmogorov-Smirnov)
    g = drawn(population, [size], 4000)[:, 0]
    mean = population.mean.double()
    distance = oracle.kolmogorov((g - mean).norm(dim=1), (expected - mean).norm(dim=1))
    assert distance < 1.95 * math.sqrt(2 / 4000)  # exceeded by chance once in a thousand


def test_heavy_tails_are_heavy():
    length = drawn(small(3, seed=13), [1], 4000)[:, 0].norm(dim=1)
    normal = drawn(small(seed=13), [1], 4000)[:, 0].norm(dim=1)
    assert length.max() > 3 * normal.max()
    assert length.median() < 0.9 * normal.median()


def test_a_pull_moves_the_mean_alone():
    pulled, plain = small(seed=14), small(seed=14)
    difference = pulled.gradients([2, 3], signal_factor=4.0) - plain.gradients([2, 3])
    # sqrt(4) - 1 = 1 mean more; the rounding of float32 at sizes below 16
    assert torch.allclose(plain.mean.expand(2, 12), difference, atol=1e-5)


def test_a_seed_repeats_its_draws_and_another_does_not():
    first, again, other = (small(3, seed=seed).gradients([2, 3]) for seed in (15, 15, 16))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# what the meter makes of it


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 7, 2, 5]])
def test_a_measured_step_is_that_of_the_gradients_drawn(sizes):
    population, replica = recorded_population(30, seed=17), recorded_population(30, seed=17)
    with GradientMeter(population.parameters()) as meter:
        for pull in (1.0, 0.5):
            step = measure_step(meter, population, sizes, pull)
            expected = noise_oracle.weighted(replica.gradients(sizes, pull), sizes)
            # float32 gradients; the noise is what a difference of two larger sums leaves
            assert pytest.approx(expected.grad_sqnorm, rel=1e-4) == step.grad_sqnorm
            assert pytest.approx(expected.grad_variance, rel=1e-4) == step.grad_variance
            assert (len(sizes), sum(sizes)) == (step.micro_batches, step.samples)


def test_parameters_have_the_shapes_given_and_are_zero():
    parameters = recorded_population(5, seed=18).parameters()
    assert SHAPES == [tuple(p.shape) for p in parameters]
    assert not any(p.any() for p in parameters)
    assert all(p.requires_grad for p in parameters)


# gradients of a network


def random_images(count, *, seed):
    x = torch.randn(count, 1, 28, 28, generator=seeded(seed))
    return x, torch.randint(10, (count,), generator=seeded(seed + 1))


def test_gradients_of_each_are_those_of_one_backward_each():
    torch.manual_seed(19)
    model = network()
    x, y = random_images(503, seed=20)  # more than one chunk
    actual = per_sample_gradients(model, x, y)
    assert (503, 6162) == actual.shape
    for number in (0, 3, 500, 502):
        expected = oracle.gradient(model, x[number], y[number])
        # other kernels, in float32: GroupNorm divides by small deviations
        assert torch.allclose(expected.float(), actual[number], rtol=1e-3, atol=1e-5)


def test_the_first_stage_is_the_network_before_training():
    x, y = random_images(40, seed=21)
    population = next(recorded_stages(x, y, seed=22))
    torch.manual_seed(22)
    model = network()
    expected = oracle.truth(
        torch.stack([oracle.gradient(model, *one) for one in zip(x, y, strict=True)])
    )
    assert "CNN, step 0" == population.name
    # float32 gradients against float64 ones
    actual = (population.grad_sqnorm, population.grad_variance)
    assert pytest.approx((expected.grad_sqnorm, expected.grad_variance), rel=1e-4) == actual
    assert [p.shape for p in model.parameters()] == [p.shape for p in population.parameters()]


@pytest.mark.thorough
def test_training_does_not_depend_on_what_was_drawn_between():
    x, y = random_images(70, seed=23)
    plain, interrupted = recorded_stages(x, y, seed=24), recorded_stages(x, y, seed=24)
    before = next(plain).grad_sqnorm
    torch.manual_seed(25)
    next(interrupted).gradients([5, 5])
    torch.rand(3)
    expected, actual = next(plain), next(interrupted)
    assert "CNN, step 100" == actual.name
    assert (expected.grad_sqnorm, expected.grad_variance) == (
        actual.grad_sqnorm,
        actual.grad_variance,
    )
    assert before != actual.grad_sqnorm


@pytest.mark.parametrize("given_folder", [False, True])
def test_without_images_there_are_two_populations_and_a_note(given_folder, tmp_path):
    data = tmp_path if given_folder else None
    with pytest.warns(UserWarning, match="fashion-mnist" if given_folder else "name a data folder"):
        actual = list(populations(0, data))
    assert ["gaussian", "heavy-tailed"] == [population.name for population in actual]
    tails = []
    for population in actual:
        lengths = (population.gradients([1] * 300) - population.mean).norm(dim=1)
        tails.append(float(lengths.max() / lengths.median()))
    assert tails[0] < 1.5 < 3 < tails[1]  # of 100 effective directions normal lengths differ by 7 %
