"""The second moment of the micro-batch gradients and the GSNR that comes of it."""

import warnings

import pytest
import torch
from torch import nn

from bigbatch.gradients import SingleProcessSource
from bigbatch.optim.functional import gsnr
from bigbatch.statistics.second_moment import GradientMoments
from oracles import noise as oracle

torch.set_num_threads(1)  # small tensors: a second thread only waits
UNEQUAL = [3, 17, 8, 1, 11]
CLIPS = {"gamma": 0.1, "r_max": 1.0}  # as printed in the paper
WIDE = {"gamma": 0.1, "r_max": 10.0}
TINY = torch.finfo(torch.float32).tiny


def gaussian(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def watched(*parameters):
    source, moments = SingleProcessSource(parameters, explicit=True), GradientMoments()
    source.subscribe(moments)
    return source, moments


def sum_and_m2(source, moments, parameter):
    (total,), (m2,) = moments.sums_and_m2s([parameter], source.sums_of)
    return total, m2


def mean_and_s2(source, moments, parameter):
    total, m2 = sum_and_m2(source, moments, parameter)
    return total / moments.weight, m2 / moments.weight


def through_hooks(gradients, sizes, *, factor=1.0):
    """(G, s2) of mean gradients (k, P) that reach one parameter in k backwards; None: it is missed.

    `factor` stands for a loss scale, 1/N or anything else that all losses of a step share.
    """
    like = next(g for g in gradients if g is not None)
    weight, other = nn.Parameter(torch.zeros_like(like)), nn.Parameter(torch.zeros(()))
    source, moments = watched(weight, other)
    for gradient, n in zip(gradients, sizes, strict=True):
        with source.micro_batch(weight=n):
            loss = other.sum() if gradient is None else (weight * (factor * n * gradient)).sum()
            loss.backward()
    mean, s2 = mean_and_s2(source, moments, weight)
    return mean / factor, s2 / factor**2


def test_parameters_that_move_up_in_the_list_are_read_as_themselves():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    source, moments = watched(first, second)
    for chosen, gradients in ((first, gaussian(4, 3, seed=0)), (second, gaussian(4, 3, seed=1))):
        source.zero_grad()
        source.select([chosen])
        for gradient in gradients:
            with source.micro_batch(weight=1):
                (chosen * gradient).sum().backward()
        mean, s2 = mean_and_s2(source, moments, chosen)
        torch.testing.assert_close(mean.double(), gradients.mean(0))
        torch.testing.assert_close(s2.double(), gradients.var(0, correction=0))


# gsnr: the formula


@pytest.mark.parametrize("clips", [CLIPS, WIDE, {"gamma": 1.0, "r_max": 1.0}])
@pytest.mark.parametrize("seed", range(3))
def test_r_matches_the_oracle(clips, seed):
    mean, s2 = gaussian(7, 30, seed=seed), gaussian(7, 30, seed=seed + 9).square()
    mean[0, :5] = s2[0, :5] = 0.0  # dead
    s2[1, :3] = 0.0  # exact
    torch.testing.assert_close(gsnr(mean, s2, **clips), oracle.gsnr(mean, s2, **clips))


def test_a_dead_weight_gets_gamma_and_stays_out_of_the_layers_mean():
    mean, s2 = torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert pytest.approx([1.6, 0.4, 0.1, 0.1]) == gsnr(mean, s2, **WIDE).tolist()


def test_a_weight_that_all_micro_batches_agree_on_gets_r_max_and_stays_out_too():
    mean, s2 = torch.tensor([2.0, 1.0, 1e-3]), torch.tensor([1.0, 1.0, 0.0])
    assert pytest.approx([1.6, 0.4, 10.0]) == gsnr(mean, s2, **WIDE).tolist()


def test_a_layer_without_any_variance_is_gamma_where_dead_and_r_max_elsewhere():
    mean = torch.tensor([0.0, 1.0, -2.0])
    assert pytest.approx([0.1, 10.0, 10.0]) == gsnr(mean, torch.zeros(3), **WIDE).tolist()
    assert pytest.approx([0.1, 0.1, 0.1]) == gsnr(0 * mean, torch.zeros(3), **WIDE).tolist()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("variance", [1e-10, 1.0, 1e20])
def test_a_layer_of_one_weight_gets_one(shape, variance):
    mean, s2 = torch.full(shape, -3.0), torch.full(shape, variance)
    assert torch.equal(torch.ones(shape), gsnr(mean, s2, **WIDE))


def test_an_empty_layer_stays_empty():
    assert (0, 3) == gsnr(torch.zeros(0, 3), torch.zeros(0, 3), **CLIPS).shape


def test_a_layer_whose_gradients_cancel_gets_gamma():
    r = gsnr(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), **WIDE)
    assert pytest.approx([0.1] * 3) == r.tolist()


def test_one_weight_of_tiny_variance_owns_the_mean_and_the_others_get_gamma():
    mean, s2 = torch.ones(1000), torch.ones(1000)
    s2[0] = 1e-4
    r = gsnr(mean, s2, **WIDE)
    assert 10.0 == r[0]
    assert torch.equal(torch.full((999,), 0.1), r[1:])


@pytest.mark.parametrize("smallest", [1e-9, TINY, TINY / 2**20, 0.0])
def test_a_variance_within_rounding_is_agreement_and_owns_no_mean(smallest):
    mean, s2 = torch.full((100,), 1e3), torch.ones(100)
    s2[:50] = smallest  # 3e-5 and less against 1e3, whose last digit is worth 6e-5
    r = gsnr(mean, s2, **WIDE)
    assert pytest.approx([10.0] * 50) == r[:50].tolist()
    assert pytest.approx([1.0] * 50) == r[50:].tolist()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_squares_beyond_float32_are_no_obstacle(scale):
    mean, s2 = scale * torch.tensor([1e4, 2e4]), scale**2 * torch.tensor([1.0, 1.0])
    assert pytest.approx([0.4, 1.6]) == gsnr(mean, s2, **WIDE).tolist()


@pytest.mark.parametrize("c", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_r_does_not_depend_on_the_gradients_unit(c, dtype):
    mean, s2 = gaussian(50, seed=0, dtype=dtype), gaussian(50, seed=1, dtype=dtype).square()
    torch.testing.assert_close(gsnr(mean, s2, **WIDE), gsnr(c * mean, c**2 * s2, **WIDE))


# GradientMoments: what backwards bring


@pytest.mark.parametrize("sizes", [[1, 1], [4] * 8, UNEQUAL])
def test_moments_match_two_passes(sizes):
    g = gaussian(len(sizes), 6, 5, seed=len(sizes)) + 0.5
    for expected, actual in zip(
        oracle.second_moment(g, sizes), through_hooks(g, sizes), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_moments_of_a_network_match_two_passes_over_its_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    batches = [gaussian(n, 4, seed=n) for n in UNEQUAL]
    parameters = list(model.parameters())
    alone = [torch.autograd.grad(model(x).square().mean(), parameters) for x in batches]
    source, moments = watched(*parameters)
    for x in batches:
        with source.micro_batch(weight=len(x)):
            (model(x).square().mean() * len(x) / sum(UNEQUAL)).backward()
    for parameter, *gradients in zip(parameters, *alone, strict=True):
        mean, s2 = oracle.second_moment(torch.stack(gradients), UNEQUAL)
        unit = sum(UNEQUAL)  # the losses sum to the mean loss: h_d = n_d g_d / N
        ours, ours2 = mean_and_s2(source, moments, parameter)
        torch.testing.assert_close(ours * unit, mean)
        expected, actual = oracle.gsnr(mean, s2, **WIDE), gsnr(ours, ours2, **WIDE)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("missed", [[0], [4], [1, 2], [0, 1, 4], [0, 1, 2, 3]])
def test_a_micro_batch_that_misses_a_parameter_counts_as_a_gradient_of_zero(missed):
    g = gaussian(5, 12, seed=0) + 0.5
    rows = [None if d in missed else row for d, row in enumerate(g)]
    g[missed] = 0.0
    for expected, actual in zip(
        oracle.second_moment(g, UNEQUAL), through_hooks(rows, UNEQUAL), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("m", "k"), [(1, 2), (3, 8), (7, 8), (1, 16)])
def test_a_row_that_m_of_k_micro_batches_see_equally_has_a_ratio_of_m_over_k_minus_m(m, k):
    row = torch.tensor([2.0, -0.5], dtype=torch.float64)
    mean, s2 = through_hooks([row if d % k < m else None for d in range(k)], [4] * k)
    assert pytest.approx([m / (k - m)] * 2) == (mean.square() / s2).tolist()


def test_a_parameter_that_no_micro_batch_reached_has_moments_of_zero():
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    source, moments = watched(weight, other)
    for step in (weight, other):  # each has had its step; the one before is forgotten
        source.zero_grad()
        for _ in range(2):
            with source.micro_batch():
                step.sum().backward()
    assert [False] == moments.are_reached([weight])
    assert all(
        torch.equal(torch.zeros(2), moment) for moment in sum_and_m2(source, moments, weight)
    )
    assert [True] == moments.are_reached([other])


def test_a_step_knows_nothing_of_the_step_before():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    source, moments = watched(weight)
    for seed in (0, 1):
        source.zero_grad()
        g = gaussian(4, 3, seed=seed)
        for row in g:
            with source.micro_batch():
                (weight * row).sum().backward()
    mean, s2 = oracle.second_moment(g, [1] * 4)
    ours, ours2 = mean_and_s2(source, moments, weight)
    torch.testing.assert_close(ours, mean)
    torch.testing.assert_close(ours2, s2)


def test_the_order_of_the_micro_batches_does_not_matter():
    g = gaussian(5, 40, seed=0) + 0.5
    expected = gsnr(*through_hooks(g, UNEQUAL), **WIDE)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        actual = gsnr(*through_hooks(g[order], [UNEQUAL[d] for d in order]), **WIDE)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("factor", [1e-12, 1 / 40, 65536.0, 1e12])
def test_a_factor_that_all_losses_share_does_not_matter(factor):
    g = (gaussian(5, 40, seed=0) + 0.5).float()
    for expected, actual in zip(
        oracle.second_moment(g, UNEQUAL), through_hooks(g, UNEQUAL, factor=factor), strict=True
    ):
        # float32; G may nearly cancel, s2 may not
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-6)


def test_variance_is_right_where_signal_is_a_million_times_larger():
    k = 64
    g = (1 + 1e-3 * gaussian(k, 1000, seed=0)).float()
    _, expected = oracle.second_moment(g, [1] * k)
    literal = g.square().mean(0) - g.mean(0).square()
    _, centred = through_hooks(g, [1] * k)
    error = (centred / expected - 1).abs().max()
    assert (literal / expected - 1).abs().max() > 0.05  # so the case is a hard one
    assert error < 5e-4  # the mean is rounded to 6e-8, 6e-5 of a deviation


@pytest.mark.parametrize("k", [8, 16])
def test_pure_noise_has_a_mean_ratio_of_one_over_k_minus_three(k):
    mean, s2 = through_hooks(gaussian(k, 200_000, seed=k), [4] * k)
    ratio = mean.square() / s2
    error = float(ratio.std()) / 200_000**0.5  # about .4 % of the mean
    assert pytest.approx(1 / (k - 3), abs=4 * error) == float(ratio.mean())
    t2 = ratio * (k - 1)  # (k - 1) r is the square of Student's t
    assert pytest.approx((k - 1) / (k - 3), abs=4 * error * (k - 1)) == float(t2.mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_summed_and_squared_in_float32(dtype):
    g = (gaussian(16, 200, seed=0) * 1e-3 + 0.5).to(dtype)  # sums round in the half types
    mean, s2 = through_hooks(g, [1] * 16)
    expected_mean, expected_s2 = oracle.second_moment(g, [1] * 16)
    assert (torch.float32, torch.float32) == (mean.dtype, s2.dtype)
    torch.testing.assert_close(mean, expected_mean.float())
    # deviations of 1e-3 of values of .5: float32 leaves 1e-4 of them
    torch.testing.assert_close(s2, expected_s2.float(), rtol=1e-3, atol=1e-12)


def test_small_float16_gradients_of_unequal_micro_batches_lose_nothing():
    sizes = [512, 256, 1024, 128, 700, 512, 640, 324]  # h_d = n_d g_d / N, which float16 holds
    h = (gaussian(8, 200, seed=2) * 1e-4 * torch.tensor(sizes)[:, None] / 512).half()
    means = h.double() / torch.tensor(sizes)[:, None]  # near 2e-7, which it does not
    weight = nn.Parameter(torch.zeros_like(h[0]))
    source, moments = watched(weight)
    for gradient, n in zip(h, sizes, strict=True):
        with source.micro_batch(weight=n):
            (weight * gradient).sum().backward()
    mean, s2 = mean_and_s2(source, moments, weight)
    expected_mean, expected_s2 = oracle.second_moment(means, sizes)
    torch.testing.assert_close(mean, expected_mean.float(), rtol=1e-4, atol=1e-11)
    torch.testing.assert_close(s2, expected_s2.float(), rtol=1e-4, atol=1e-18)


def test_two_backwards_in_one_micro_batch_are_one_gradient():
    weight = nn.Parameter(torch.zeros(2))
    source, moments = watched(weight)
    for factor in (1.0, 3.0):
        with source.micro_batch():
            (weight.sum() * factor).backward()
            (weight.sum() * factor).backward()
    total, m2 = sum_and_m2(source, moments, weight)
    assert [8.0, 8.0] == total.tolist()  # 2 and 6, whose mean is 4
    assert [8.0, 8.0] == m2.tolist()


def test_moments_hold_no_graph_where_backward_creates_one():
    weight = nn.Parameter(torch.ones(2))
    source, moments = watched(weight)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch's: such a gradient is a reference cycle
        for _ in range(2):
            with source.micro_batch():
                weight.pow(3).sum().backward(create_graph=True)
    assert not sum_and_m2(source, moments, weight)[1].requires_grad
    source.zero_grad()
