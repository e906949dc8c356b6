"""SimiGrad's own cosine of two half-batch gradients, by the parity of the micro-batch."""

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch import AdaptiveBatch, Fixed, GradientMeter

torch.set_num_threads(1)  # small tensors: a second thread only waits
RAGGED = [3, 9, 1, 6, 2, 8, 5]


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def feed(parameter, gradient):
    """One backward whose gradient is `gradient`."""
    (parameter * gradient.to(parameter.dtype)).sum().backward()


def measured(gradients, sizes, *, loss="weighted", dtype=torch.float64, half_batch_cosine=True):
    """What a meter says of one parameter whose micro-batches have these mean gradients."""
    weight = nn.Parameter(torch.zeros(gradients.shape[1:], dtype=dtype))
    with GradientMeter([weight], loss=loss, half_batch_cosine=half_batch_cosine) as meter:
        for gradient, n in zip(gradients, sizes, strict=True):
            feed(weight, gradient * (n / sum(sizes) if loss == "weighted" else 1.0))
        return meter.read(sizes)


def cosine(gradients, sizes, *, loss):
    """Of the sums of what the even and the odd micro-batches add to `.grad`."""
    shares = torch.tensor(sizes if loss == "weighted" else [1] * len(sizes)).double()
    added = (gradients.double().flatten(1).T * shares).T
    return float(torch.cosine_similarity(added[::2].sum(0), added[1::2].sum(0), dim=0))


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("k", range(2, 8))
def test_it_is_the_cosine_of_the_even_and_the_odd_micro_batches(k, loss):
    gradients, sizes = draw(k, 6, 7, seed=k) + 0.2, RAGGED[:k]
    expected = cosine(gradients, sizes, loss=loss)
    assert (
        pytest.approx(expected, rel=1e-9) == measured(gradients, sizes, loss=loss).half_batch_cosine
    )


@pytest.mark.parametrize("turned", [1.0, -1.0])
def test_parallel_halves_have_a_cosine_of_one_and_opposite_ones_of_minus_one(turned):
    a = draw(20, seed=1)
    step = measured(torch.stack([a, 3 * turned * a]), [4, 4])
    # 1 - cos of float64 sums: 1e-16, whose root enters
    assert pytest.approx(turned, abs=1e-7) == step.half_batch_cosine


def test_orthogonal_halves_have_a_cosine_of_zero():
    # the norm of .grad is rounded before it is squared
    cosine = measured(torch.eye(2, dtype=torch.float64), [4, 4]).half_batch_cosine
    assert pytest.approx(0.0, abs=1e-15) == cosine


def test_two_micro_batches_of_equal_norm_have_their_similarity_as_cosine():
    a, b = draw(2, 30, seed=2) + 0.3
    step = measured(torch.stack([a / a.norm(), b / b.norm()]), [4, 4])
    assert pytest.approx(step.similarity) == step.half_batch_cosine


def test_two_micro_batches_of_unequal_norm_have_another_cosine_than_similarity():
    a, b = draw(2, 30, seed=2) + 0.3
    a, b = a / a.norm(), 3 * b / b.norm()
    step = measured(torch.stack([a, b]), [4, 4])
    assert pytest.approx(float(a @ b) / 3) == step.half_batch_cosine
    assert pytest.approx(2 * float(a @ b) / 10) == step.similarity  # over (1 + 9) / 2


# sums in float32 know the square of the shorter half to 1 part in 10^7 fraction^2; how they round
# depends on the machine
@pytest.mark.parametrize(
    ("fraction", "error"), [(1.0, 1e-6), (0.1, 1e-5), (1e-2, 1e-3), (1e-3, 0.05), (1e-4, 0.05)]
)
def test_float32_halves_of_very_different_length_have_their_cosine_or_none(fraction, error):
    for seed in range(4):
        a, b = draw(2, 3000, seed=seed)
        gradients = torch.stack([a, fraction * (0.5 * a + b)])
        expected = cosine(gradients, [4, 4], loss="mean")
        actual = measured(gradients, [4, 4], loss="mean", dtype=torch.float32).half_batch_cosine
        assert math.isnan(actual) or pytest.approx(expected, abs=error) == actual
    assert fraction < 1e-3 or not math.isnan(actual)


def test_bfloat16_halves_are_summed_in_float32():
    gradients = (draw(20, 500, seed=5) + 0.2).bfloat16()
    # .grad itself is bfloat16: 20 additions, each rounded to 1 part in 512
    step = measured(gradients, [4] * 20, loss="mean", dtype=torch.bfloat16)
    assert (
        pytest.approx(cosine(gradients, [4] * 20, loss="mean"), abs=0.02) == step.half_batch_cosine
    )


def test_the_difference_of_float16_halves_may_leave_their_range():
    gradients = torch.tensor([[48e3, 1e4], [-48e3, 1e4]])  # .grad is (0, 2e4), the other 96e3, 0
    step = measured(gradients, [4, 4], loss="mean", dtype=torch.float16)
    assert pytest.approx((1 - 4.8**2) / (1 + 4.8**2), rel=1e-6) == step.half_batch_cosine  # float32


@pytest.mark.parametrize("zero", [[0, 1], [0], [1]])
def test_a_half_without_any_gradient_has_no_cosine(zero):
    gradients = draw(2, 9, seed=6)
    gradients[zero] = 0
    assert math.isnan(measured(gradients, [4, 4]).half_batch_cosine)


def test_a_gradient_that_is_not_finite_gives_no_cosine():
    gradients = draw(4, 9, seed=7)
    gradients[1, 2] = math.inf
    with pytest.warns(UserWarning, match="micro-batch 2"):
        assert not math.isfinite(measured(gradients, [4] * 4).half_batch_cosine)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3)
        for n in sizes
    ]


def halves_of(model, batches, reached):
    """The cosine from `autograd.grad`; a micro-batch that does not reach a parameter adds 0."""
    model = copy.deepcopy(model)  # without the meter's hooks
    total = sum(len(y) for _, y in batches)
    rows = []
    for x, y in batches:
        parts = torch.autograd.grad(
            cross_entropy(model(x), y), list(model.parameters()), materialize_grads=True
        )
        rows.append(torch.cat([p.flatten() for p in parts]) * len(y) / total)
    rows = torch.stack(rows) * reached[:, None]
    return float(torch.cosine_similarity(rows[::2].sum(0), rows[1::2].sum(0), dim=0))


def test_every_step_of_a_network_has_its_own_cosine():
    model, sizes = network(), RAGGED[:5]
    meter = GradientMeter(model, half_batch_cosine=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        expected = halves_of(model, data(sizes), torch.ones(5))
        for x, y in data(sizes):
            (cross_entropy(model(x), y) * len(y) / sum(sizes)).backward()
        assert pytest.approx(expected) == meter.read(sizes).half_batch_cosine
        optimizer.step()
        optimizer.zero_grad()


def test_a_marked_micro_batch_without_backward_is_a_half_of_zero():
    model, sizes = network(), RAGGED[:4]
    meter = GradientMeter(model, half_batch_cosine=True)
    expected = halves_of(model, data(sizes), torch.tensor([1, 1, 1, 0]))
    for d, (x, y) in enumerate(data(sizes)):
        with meter.micro_batch():
            if d != 3:
                (cross_entropy(model(x), y) * len(y) / sum(sizes)).backward()
    assert pytest.approx(expected) == meter.read(sizes).half_batch_cosine


def test_a_parameter_that_only_one_half_reaches_counts():
    pair = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    with GradientMeter(pair, loss="mean", half_batch_cosine=True) as meter:
        feed(pair[0], torch.tensor([3.0, 4.0]))  # (3, 4, 0, 0)
        (pair[0][0] + pair[1][0]).backward()  # (1, 0, 1, 0)
        assert pytest.approx(3 / (5 * math.sqrt(2))) == meter.read([4, 4]).half_batch_cosine


def test_without_asking_there_is_none():
    assert measured(draw(3, 9, seed=8), [4] * 3, half_batch_cosine=False).half_batch_cosine is None


def test_a_loop_with_a_meter_that_takes_halves_records_the_cosine():
    model, (x, y) = network(), data([16])[0]
    train = AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [(x, y)],
        policy=Fixed(16),
        micro_batch=4,
        meter=GradientMeter(model, half_batch_cosine=True),
        every=1,
    )
    for step in train:
        batches = []
        for batch in step:
            batches.append(batch)
            step.backward(cross_entropy(model(batch[0]), batch[1]))
        expected = halves_of(model, batches, torch.ones(4))
        assert pytest.approx(expected) == step.update().statistics.half_batch_cosine


def memory_of(model, **options):
    """Tensors of the weight's size that are alive after one measured step."""
    x = draw(4, 8, 64, seed=9)
    meter = GradientMeter(model, **options)
    for micro_batch in x:
        (model(micro_batch).square().mean() / 4).backward()
    meter.read([8] * 4)
    gc.collect()
    large = [
        o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == model.weight.shape
    ]
    meter.close()
    return len(large)


def test_only_where_it_is_asked_for_a_gradient_is_kept():
    model = nn.Linear(64, 96).double()
    without = memory_of(model)
    model.zero_grad()
    assert without + 1 == memory_of(model, half_batch_cosine=True)
