"""Signal, noise and similarity from the norms of one step's gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import GradientStatistics
from bigbatch.errors import GradientError
from bigbatch.statistics.noise_scale import from_mean_losses, from_weighted_losses
from oracles import noise as oracle
from property_tests import property_test

torch.set_num_threads(1)  # small tensors: a second thread only waits
UNEQUAL = [3, 17, 8, 1, 11]


def of_weighted(norms, total_sqnorm, sizes):
    """The library's function, from |h_d|^2 and n_d of each micro-batch."""
    over_sizes = math.fsum(norm / n for norm, n in zip(norms, sizes, strict=True))
    return from_weighted_losses(over_sizes, total_sqnorm, len(sizes), math.fsum(sizes))


def of_mean(norms, total_sqnorm, sizes):
    """The same for plain mean losses."""
    inverse = math.fsum(1 / n for n in sizes)
    return from_mean_losses(math.fsum(norms), total_sqnorm, len(sizes), math.fsum(sizes), inverse)


def weighted(gradients, sizes):
    """From micro-batch mean gradients (k, P), as a meter sees losses weighted by n_d / N."""
    n = torch.tensor(sizes, dtype=torch.float64)
    added = gradients.double() * (n / n.sum())[:, None]
    norms = added.square().sum(1).tolist()
    return of_weighted(norms, float(added.sum(0).square().sum()), sizes)


def mean(gradients, sizes):
    """The same where each loss is its micro-batch's plain mean."""
    norms = gradients.double().square().sum(1).tolist()
    return of_mean(norms, float(gradients.double().sum(0).square().sum()), sizes)


def gaussian(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# closed forms


def test_two_opposite_gradients_are_pure_noise():
    step = weighted(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]), [8, 8])
    assert (
        GradientStatistics(grad_sqnorm=-4.0, grad_variance=64.0, samples=16, micro_batches=2)
        == step
    )
    assert (-1.0, math.inf) == (step.similarity, step.noise_scale)


def test_equal_gradients_are_pure_signal():
    step = weighted(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), [8, 8])
    assert (
        GradientStatistics(grad_sqnorm=25.0, grad_variance=0.0, samples=16, micro_batches=2) == step
    )
    assert (1.0, 0.0) == (step.similarity, step.noise_scale)


def test_two_orthogonal_gradients_have_no_similarity():
    step = weighted(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), [8, 8])
    assert (0.0, math.inf) == (step.similarity, step.noise_scale)


def test_three_unequal_micro_batches_by_hand():
    gradients, sizes = torch.tensor([[1.0], [2.0], [4.0]]), [1, 2, 1]
    step = weighted(gradients, sizes)  # G = 9/4, A = 25, N |G|^2 = 20.25
    assert pytest.approx((4.46875, 2.375)) == (step.grad_sqnorm, step.grad_variance)
    step = mean(gradients, sizes)  # P = 49/9, S = 21, H = 5/2
    assert pytest.approx((14 / 3, 2.8)) == (step.grad_sqnorm, step.grad_variance)


@pytest.mark.parametrize("form", [weighted, mean])
def test_two_micro_batches_give_the_cosine_with_its_norms_averaged(form):
    a, b = gaussian(2, 20, seed=0) + 0.3
    expected = 2 * float(a @ b) / float(a @ a + b @ b)
    assert pytest.approx(expected) == form(torch.stack([a, b]), [8, 8]).similarity


@pytest.mark.parametrize("form", [weighted, mean])
def test_signal_is_the_mean_dot_product_of_all_pairs(form):
    g = gaussian(6, 20, seed=1) + 0.3
    dots = g @ g.T
    expected = float(dots.sum() - dots.trace()) / 30
    assert pytest.approx(expected) == form(g, [4] * 6).grad_sqnorm


def test_noise_is_mccandlishs_from_a_small_and_a_big_batch():
    g, small, big = gaussian(6, 20, seed=2) + 0.3, 4, 24
    of_small, of_big = float(g.square().sum(1).mean()), float(g.mean(0).square().sum())
    expected_signal = (big * of_big - small * of_small) / (big - small)
    expected_noise = (of_small - of_big) / (1 / small - 1 / big)
    step = weighted(g, [small] * 6)
    assert pytest.approx((expected_signal, expected_noise)) == (
        step.grad_sqnorm,
        step.grad_variance,
    )


# oracle, unbiasedness, range


@pytest.mark.parametrize("form", [weighted, mean])
@pytest.mark.parametrize("seed", range(5))
def test_unequal_micro_batches_match_the_oracle(form, seed):
    g = gaussian(5, 30, seed=seed) + 0.4
    expected, actual = getattr(oracle, form.__name__)(g, UNEQUAL), form(g, UNEQUAL)
    assert pytest.approx(tuple(expected)) == (
        actual.grad_sqnorm,
        actual.grad_variance,
        actual.similarity,
        actual.noise_scale,
    )
    assert (40, 5) == (actual.samples, actual.micro_batches)


@pytest.mark.parametrize("form", [weighted, mean])
def test_signal_and_noise_are_unbiased_with_unequal_sizes(form):
    mu, std = torch.tensor([1.0, -0.5, 0.25]), torch.tensor([1.0, 2.0, 0.5])
    sizes, draws = [2, 5, 9], 10_000
    per_sample = std / torch.tensor(sizes).sqrt()[:, None]
    g = mu + per_sample * gaussian(draws, 3, 3, seed=3)
    steps = [form(step, sizes) for step in g]
    for truth, name in ((1.3125, "grad_sqnorm"), (5.25, "grad_variance")):  # |mu|^2, sum std^2
        seen = torch.tensor([getattr(step, name) for step in steps])
        error = float(seen.std()) / math.sqrt(
            draws
        )  # about 1 % of the truth: 1/k would be 33 % off
        assert pytest.approx(truth, abs=4 * error) == float(seen.mean())


def test_similarity_estimates_the_cosine_of_two_half_batches_and_is_steadier():
    k, n, dimensions, draws = 16, 4, 1000, 300
    mu = torch.zeros(dimensions, dtype=torch.float64)
    mu[0] = 1.0
    std = math.sqrt(64 / dimensions)  # tr Sigma = 64 = B_simple, N = 64: phi = 1/3
    g = mu + std / math.sqrt(n) * gaussian(draws, k, dimensions, seed=4)
    halves = torch.cosine_similarity(g[:, ::2].mean(1), g[:, 1::2].mean(1))
    phi = torch.tensor([weighted(step, [n] * k).similarity for step in g])
    # standard error .002, and about .002 of bias as there are only 1,000 directions
    assert pytest.approx(1 / 3, abs=0.01) == float(halves.mean())
    assert pytest.approx(1 / 3, abs=0.01) == float(phi.mean())
    assert phi.var() < 0.75 * halves.var()  # .4 to .5 measured; 300 draws know it to 12 %


VECTORS = st.lists(
    st.tuples(st.lists(st.integers(-9, 9), min_size=2, max_size=2), st.integers(1, 100)),
    min_size=2,
    max_size=6,
)


@pytest.mark.parametrize("form", [weighted, mean])
@given(micro_batches=VECTORS)
@property_test(200)
def test_similarity_is_a_cosine_and_the_noise_scale_is_never_negative(form, micro_batches):
    gradients, sizes = zip(*micro_batches, strict=True)
    step = form(torch.tensor(gradients), list(sizes))
    assert step.grad_variance >= 0
    if any(any(g) for g in gradients):
        assert -1 <= step.similarity <= 1
        assert step.noise_scale >= 0
    else:
        assert math.isnan(step.similarity)


def test_a_mean_loss_step_of_very_unequal_sizes_keeps_its_similarity_a_cosine():
    step = mean(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), [1, 100])
    assert step.grad_sqnorm < 0
    assert -1 <= step.similarity <= 0


@pytest.mark.parametrize("sizes", [[0.7, 0.7], [0.2, 0.2], [0.5, 1.75]])
def test_sizes_that_are_no_whole_numbers_keep_their_sum(sizes):
    g = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    assert pytest.approx(oracle.weighted(g, sizes).similarity) == weighted(g, sizes).similarity


def test_weights_that_stand_for_whole_samples_give_a_whole_number():
    g = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
    samples = weighted(g, [0.1 + 0.2, 2.7]).samples
    assert (3, int) == (samples, type(samples))


# where the ratios are not defined


def test_the_noise_scale_is_infinite_where_the_signal_is_not_positive():
    assert math.inf == GradientStatistics(0.0, 1.0, samples=8, micro_batches=2).noise_scale
    assert math.inf == GradientStatistics(-1.0, 8.0, samples=8, micro_batches=2).noise_scale
    assert 8.0 == GradientStatistics(1.0, 8.0, samples=8, micro_batches=2).noise_scale


def test_no_gradient_at_all_has_neither_similarity_nor_noise_scale():
    step = weighted(torch.zeros(3, 2), [8, 8, 8])
    assert (0.0, 0.0) == (step.grad_sqnorm, step.grad_variance)
    assert math.isnan(step.similarity)
    assert math.isnan(step.noise_scale)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_give_no_finite_answer(bad):
    step = of_weighted([bad, 1.0], bad, [8, 8])
    assert not math.isfinite(step.grad_sqnorm)
    assert not math.isfinite(step.grad_variance)
    assert math.isnan(step.similarity)
    assert not math.isfinite(step.noise_scale)


def test_a_sum_longer_by_rounding_is_no_noise():
    step = of_weighted([1.0, 1.0], 4.0 + 1e-6, [8, 8])
    assert (0.0, 1.0) == (step.grad_variance, step.similarity)


# refusals


@pytest.mark.parametrize("form", [of_weighted, of_mean])
@pytest.mark.parametrize(
    ("norms", "total_sqnorm", "sizes", "words"),
    [
        ([], 0.0, [], "0 micro-batch"),
        ([1.0], 1.0, [8], "1 micro-batch"),
        ([1.0, 1.0], 4.1, [8, 8], "longer than its micro-batches allow"),
    ],
)
def test_numbers_that_no_step_can_give_are_refused(form, norms, total_sqnorm, sizes, words):
    with pytest.raises(GradientError, match=words):
        form(norms, total_sqnorm, sizes)


def test_sizes_in_the_wrong_order_are_refused_where_they_cannot_be_right():
    n = torch.tensor([1.0, 31.0])
    added = torch.ones(2, 4) * (n / 32)[:, None]  # two equal gradients
    norms, total_sqnorm = added.square().sum(1).tolist(), 4.0
    assert 0.0 == of_weighted(norms, total_sqnorm, [1, 31]).grad_variance
    with pytest.raises(GradientError, match="longer"):
        of_weighted([norms[0], norms[0]], total_sqnorm, [1, 31])
