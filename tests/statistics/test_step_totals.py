"""What stands in `.grad` against what was seen: found for any number of ranks, or refused."""

import math

import numpy
import pytest
import torch

from bigbatch.errors import GradientError
from bigbatch.statistics.step_totals import RankTotals, StepTotals

PROBES, ELEMENTS = 8, 4096
CASES = [(1, 2), (1, 64), (2, 1), (2, 8), (8, 8), (32, 4), (64, 8), (256, 2), (256, 8)]
EPS = {torch.float32: 1.2e-7, torch.bfloat16: 2**-7}


def totals_of(gradients, grad, counts=None, grad_sqnorms=None):
    """Of gradients (ranks, k, elements) and what stands in `.grad`.

    `counts` and `grad_sqnorms` are what each rank says of k and |.grad|^2 instead.
    """
    ranks, k, _ = gradients.shape
    counts = counts or [k] * ranks
    grad_sqnorms = grad_sqnorms or [float(grad.double().square().sum())] * ranks
    draw = torch.Generator().manual_seed(1)
    signs = torch.randint(2, (PROBES, ELEMENTS), generator=draw).double() * 2 - 1
    projected = gradients.double() @ signs.t()
    squares = gradients.double().square().sum((1, 2))
    rows = RankTotals(
        *numpy.array(
            [
                [count, count, 0, float(q), float(q), grad_sqnorm, 0]
                for count, q, grad_sqnorm in zip(counts, squares, grad_sqnorms, strict=True)
            ]
        ).T
    )
    return StepTotals(
        {
            **{name: [1.0] for name in ("sqnorms_over_sizes", "sqnorms", "inverse_sizes")},
            "grad_sqnorms": [sum(grad_sqnorms) / ranks],
            "slope": [0.0, 0.0],
            "scale": [1.0],
            "micro_batch_projections": projected.sum((0, 1)).tolist(),
            "grad_projections": (signs @ grad.double()).tolist(),
            "projection_sqnorm": [float(projected.square().sum())],
            "counted": [sum(counts), sum(counts), sum(n * n for n in counts), 0.0, 0.0, 0.0],
            "grad_fourth_powers": [sum(grad_sqnorm**2 for grad_sqnorm in grad_sqnorms)],
        },
        ranks,
        lambda: rows,
    )


def step(ranks, k, mean, dtype):
    """Gradients, and what accumulating and reducing them rank by rank in this type leaves."""
    draw = torch.Generator().manual_seed(ranks + k)
    gradients = (torch.randn(ranks, k, ELEMENTS, generator=draw) + mean).to(dtype)
    local = torch.zeros(ranks, ELEMENTS, dtype=dtype)
    for number in range(k):
        local += gradients[:, number]
    total = torch.zeros(ELEMENTS, dtype=dtype)
    for rank_sum in local:
        total += rank_sum / ranks
    return gradients, total


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("mean", [0.0, 0.05, 1.0], ids=["noise", "both", "signal"])
@pytest.mark.parametrize(("ranks", "k"), CASES)
def test_a_mean_and_a_sum_are_distinguished_and_a_clipped_one_is_refused(ranks, k, mean, dtype):
    gradients, grad = step(ranks, k, mean, dtype)
    assert 1 / ranks == totals_of(gradients, grad).reduction(EPS[dtype], True)
    assert 1 == totals_of(gradients, grad * ranks).reduction(EPS[dtype], True)
    for factor in (0.5, 0.8):
        with pytest.raises(GradientError, match="not the sum"):
            totals_of(gradients, grad * factor).reduction(EPS[dtype], True)


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["noise", "signal"])
@pytest.mark.parametrize(("ranks", "k"), CASES)
def test_float32_gradients_may_be_reduced_in_bfloat16(ranks, k, mean):
    gradients, _ = step(ranks, k, mean, torch.float32)
    total = torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    for rank_sum in gradients.sum(1).bfloat16():
        total += rank_sum / ranks
    if ranks > 1:
        assert 1 / ranks == totals_of(gradients, total).reduction(EPS[torch.float32], True)


@pytest.mark.parametrize(("ranks", "k"), CASES)
def test_a_float32_gradient_clipped_a_little_is_refused_on_any_number_of_ranks(ranks, k):
    gradients, grad = step(ranks, k, 0.02, torch.float32)
    # three times the rounding that is allowed: |sum| and the root of the squares, each once or more
    least = 0.999 if ranks == 1 else 1 - 3 * 2**-8 * (1 + ranks**0.5)
    with pytest.raises(GradientError, match="not the sum"):
        totals_of(gradients, grad * least).reduction(EPS[torch.float32], True)


def test_the_rank_with_most_micro_batches_says_how_much_rounding_there_may_be():
    gradients, grad = step(2, 8, 1.0, torch.float32)
    bfloat16, off = EPS[torch.bfloat16], 0.96
    assert 1 / 2 == totals_of(gradients, grad * off, [1, 64]).reduction(bfloat16, True)
    with pytest.raises(GradientError, match="not the sum"):
        totals_of(gradients, grad * off, [1, 1]).reduction(bfloat16, True)


def test_replicas_whose_grad_differs_by_more_than_their_kernels_do_are_refused():
    gradients, grad = step(2, 8, 1.0, torch.float32)
    grad_sqnorm, eps = float(grad.double().square().sum()), EPS[torch.float32]
    alike = totals_of(gradients, grad, grad_sqnorms=[grad_sqnorm, grad_sqnorm * (1 - 0.9e-3)])
    assert 1 / 2 == alike.reduction(eps, replicated=True)
    other = totals_of(gradients, grad, grad_sqnorms=[grad_sqnorm, grad_sqnorm * (1 - 1.1e-3)])
    assert 1 / 2 == other.reduction(eps, replicated=False)  # shards of one gradient
    with pytest.raises(GradientError, match="differs between ranks"):
        other.reduction(eps, replicated=True)


def test_gradients_that_cancel_are_no_edit():
    gradients = torch.randn(4, 1, ELEMENTS, generator=torch.Generator().manual_seed(3))
    gradients = torch.cat([gradients, -gradients])
    rounded = torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    for rank_sum in gradients.sum(1).bfloat16():
        rounded += rank_sum / 8
    assert totals_of(gradients, rounded).reduction(EPS[torch.float32], True) in (1 / 8, 1)


def totals_of_ranks(samples, grad_sqnorms):
    """Of many ranks with one micro-batch each; counts how often their rows are gathered."""
    ranks, gathered = len(samples), []
    ones = [1.0] * ranks
    rows = numpy.array([ones, samples, [0.0] * ranks, ones, ones, grad_sqnorms, ones])

    def gather():
        gathered.append(1)
        return RankTotals(*rows)

    sums = {
        "counted": [ranks, math.fsum(samples), math.fsum(n * n for n in samples), 0.0, 0.0, 0.0],
        "grad_fourth_powers": [math.fsum(g * g for g in grad_sqnorms)],
        "grad_sqnorms": [math.fsum(grad_sqnorms) / ranks],
        "projection_sqnorm": [float(ranks)],
        "micro_batch_projections": [float(ranks)],
        "grad_projections": [1.0],
    }
    one = {name: [1.0] for name in ("sqnorms_over_sizes", "sqnorms", "inverse_sizes", "scale")}
    return StepTotals(one | sums, ranks, gather), gathered


@pytest.mark.parametrize("ranks", [2, 3, 4096, 8192])
def test_one_rank_among_many_that_differs_is_found_by_sums_alone(ranks):
    totals, gathered = totals_of_ranks([1000.0] * ranks, [0.3] * ranks)
    assert [] == totals.unequal_samples()
    assert 1 / ranks == totals.reduction(1.2e-7, replicated=True)
    assert [] == gathered
    other = [1000.0] * (ranks - 1) + [1001.0]
    assert other == totals_of_ranks(other, [0.3] * ranks)[0].unequal_samples()
    off, gathered = totals_of_ranks([8.0] * ranks, [0.3] * (ranks - 1) + [0.3 * (1 + 1.1e-3)])
    with pytest.raises(GradientError, match="differs between ranks"):
        off.reduction(1.2e-7, replicated=True)
    assert [1] == gathered


def test_weights_that_are_no_integers_are_compared_by_value():
    totals, _ = totals_of_ranks([0.1] * 8192, [0.3] * 8192)
    assert [] == totals.unequal_samples()
