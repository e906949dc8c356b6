"""The noise scale in the l1 norm, against an oracle that reads one element after the other."""

import math
from functools import partial
from statistics import fmean

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from bigbatch.errors import GradientError
from bigbatch.statistics.l1_noise_scale import l1_noise_scale, root_bias
from oracles import noise as oracle
from training_on_ranks import ENGINES, EQUAL, SAME_TOTAL, gradients, network, train

torch.set_num_threads(1)  # small tensors: a second thread only waits


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measured(gradients, size, *, loss="weighted", dtype=torch.float64):
    """The l1 noise scale of one parameter whose micro-batches have these mean gradients."""
    weight = nn.Parameter(torch.zeros(gradients.shape[1:], dtype=dtype))
    share = 1 / len(gradients) if loss == "weighted" else 1.0
    with GradientMeter([weight], loss=loss, l1_noise_scale=True) as meter:
        for gradient in gradients:
            (weight * gradient.to(dtype)).sum().mul(share).backward()
        return meter.read([size] * len(gradients)).l1_noise_scale


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (33,), (70_001,)])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_it_is_what_the_oracle_computes(k, shape, loss):
    g = draw(k, *shape, seed=k) + 0.3
    expected = oracle.l1_noise_scale(g, [4] * k)
    assert pytest.approx(expected, rel=1e-9) == measured(g, 4, loss=loss)


@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.05)]
)
def test_half_gradients_are_summed_in_float32(dtype, rel):
    g = draw(8, 5000, seed=1) + 0.3
    # the gradient itself, and its share of the loss, are rounded to 11 and to 8 bits
    assert pytest.approx(oracle.l1_noise_scale(g, [4] * 8), rel=rel) == measured(g, 4, dtype=dtype)


def test_a_factor_on_all_losses_cancels():
    g = draw(4, 40, seed=2) + 0.3
    assert pytest.approx(measured(g, 4)) == measured(1e-9 * g, 4)


def test_it_is_in_samples():
    g = draw(4, 40, seed=2) + 0.3
    assert pytest.approx(3 * measured(g, 4)) == measured(g, 12)


def test_elements_alike_have_the_noise_scale_of_one():
    g = draw(6, 1, seed=3) + 2
    assert pytest.approx(measured(g, 4)) == measured(g.expand(6, 500), 4)


@pytest.mark.filterwarnings("ignore:all 4 micro-batches of a step have the same gradient")
def test_equal_gradients_have_no_noise_and_opposite_ones_no_signal():
    one = draw(1, 30, seed=4)
    assert pytest.approx(0, abs=1e-30) == measured(one.expand(4, 30), 4)  # of float64
    assert math.inf == measured(torch.cat([one, -one]), 4)
    assert math.isnan(measured(torch.zeros(2, 30, dtype=torch.float64), 4))


def test_root_bias_is_that_of_normal_numbers():
    for k in (2, 3, 8):
        # 20,000 standard deviations, each with a scatter of at most 0.6
        assert pytest.approx(root_bias(k), abs=0.015) == draw(20_000, k, seed=k).std(1).mean()
    assert pytest.approx(1, abs=1e-4) == root_bias(10_000)


def test_it_nears_the_truth_from_below_as_samples_grow():
    mean = draw(2000, seed=5)
    truth = 2000**2 / float(mean.abs().sum()) ** 2  # per sample, sigma_j = 1
    values = []
    for size in (1, 16, 256):
        steps = [
            mean + draw(8, 2000, seed=10 * size + trial) / math.sqrt(size) for trial in range(5)
        ]
        values.append(fmean(measured(step, size) for step in steps))
    assert values[0] < values[1] < values[2] < 1.02 * truth
    assert pytest.approx(truth, rel=0.02) == values[2]


def test_pure_noise_has_half_pi_of_the_samples():
    actual = fmean(measured(draw(8, 5000, seed=20 + trial), 4) for trial in range(5))
    # (sum sigma)^2 / (sum |G|)^2 with E|G_j| = sigma_j sqrt(2 / (pi N)); 25,000 elements
    assert pytest.approx(math.pi / 2 * 32, rel=0.02) == actual


def test_groups_of_one_backward_count_as_micro_batches():
    model = nn.Linear(5, 3).double()
    x, y = draw(16, 5, seed=6), torch.arange(16) % 3
    with GradientMeter(model, groups=4, l1_noise_scale=True) as meter:
        cross_entropy(model(x), y).backward()
        actual = meter.read([16]).l1_noise_scale
    parts = zip(x.split(4), y.split(4), strict=True)
    rows = [torch.autograd.grad(cross_entropy(model(a), b), model.parameters()) for a, b in parts]
    g = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    assert pytest.approx(oracle.l1_noise_scale(g, [4] * 4)) == actual


def test_a_parameter_that_a_micro_batch_misses_has_a_gradient_of_zero_there():
    pair = nn.ParameterList([torch.zeros(3, dtype=torch.float64) for _ in range(2)])
    g = draw(3, 6, seed=7)
    g[1, 3:] = 0
    with GradientMeter(pair, loss="mean", l1_noise_scale=True) as meter:
        for number, row in enumerate(g):
            loss = (pair[0] * row[:3]).sum()
            (loss if number == 1 else loss + (pair[1] * row[3:]).sum()).backward()
        assert (
            pytest.approx(oracle.l1_noise_scale(g, [4] * 3)) == meter.read([4] * 3).l1_noise_scale
        )


def test_the_loop_knows_sizes_that_differ():
    model = nn.Linear(5, 3).double()
    x, y = draw(14, 5, seed=8), torch.arange(14) % 3
    meter = GradientMeter(model, l1_noise_scale=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loop = AdaptiveBatch(
        model, optimizer, [(x, y)], policy=Fixed(14), micro_batch=4, meter=meter, every=1
    )
    for step in loop:
        rows, sizes = [], []
        for a, b in step:
            row = torch.autograd.grad(cross_entropy(model(a), b), model.parameters())
            rows.append(torch.cat([part.flatten() for part in row]))
            sizes.append(len(a))
            step.backward(cross_entropy(model(a), b))
        actual = step.update().statistics.l1_noise_scale
    assert len(set(sizes)) > 1
    assert pytest.approx(oracle.l1_noise_scale(torch.stack(rows), sizes)) == actual


def test_sizes_that_differ_and_are_not_known_are_refused():
    weight = nn.Parameter(torch.zeros(3))
    with GradientMeter([weight], l1_noise_scale=True) as meter:
        for n in (4, 6):
            (weight * torch.rand(3)).sum().mul(n / 10).backward()
        with pytest.raises(GradientError, match="make them equal, or let AdaptiveBatch"):
            meter.read([4, 6])


def test_one_micro_batch_is_refused():
    with pytest.raises(GradientError, match="1 micro-batch seen, noise needs at least 2"):
        l1_noise_scale(1.0, 1.0, micro_batches=1, samples=4)


def test_it_is_measured_only_where_it_is_asked_for():
    weight = nn.Parameter(torch.zeros(3))
    with GradientMeter([weight]) as meter:
        for _ in range(2):
            (weight * torch.rand(3)).sum().backward()
        assert meter.read([4, 4]).l1_noise_scale is None


# ranks

SIZES = [[4, 4, 4]] * 4


def on_a_rank(rank, ranks, *, wrapper, sizes):
    model = ENGINES[wrapper](network(), ranks)
    return [r.l1_noise_scale for r in train(rank, ranks, model, sizes, l1_noise_scale=True)]


def refused(rank, ranks, *, sizes):
    try:
        on_a_rank(rank, ranks, wrapper="ddp", sizes=sizes)
    except GradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("wrapper", "count"), [("ddp", 2), ("fsdp2", 3), ("hsdp", 4)])
def test_ranks_measure_what_one_process_would(ranks, wrapper, count):
    sizes = SIZES[:count]
    results = ranks(count)(partial(on_a_rank, wrapper=wrapper, sizes=sizes))
    expected = oracle.l1_noise_scale(gradients(network(), 0, sizes), [4] * 3 * count)
    for values in results:
        assert pytest.approx(expected, rel=1e-4) == values[0]  # float32 gradients
        assert values == results[0]


@pytest.mark.parametrize("sizes", [EQUAL[:2], SAME_TOTAL[:2], [[4, 4, 4], [6, 6]]])
def test_all_ranks_refuse_sizes_that_differ(ranks, sizes):
    errors = ranks(2)(partial(refused, sizes=sizes))
    assert all("micro-batches of different sizes" in error for error in errors)
