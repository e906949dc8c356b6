"""Two consecutive steps that are compared: the estimate, its bias, its interval, its state."""

import itertools
import math
from statistics import fmean

import pytest
import torch
from torch.amp import GradScaler

from bigbatch import GradientMeter
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from kernel_recorder import Recorded
from tensors import through_a_file

torch.set_num_threads(1)  # small tensors: a second thread only waits
SHAPES = [(3, 4), (5,), (150, 150), ()]


def weights(dtype=torch.float64):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def draw(seed, dtype=torch.float64):
    own = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=own, dtype=torch.float64).to(dtype) for shape in SHAPES]


def flat(gradients):
    """All elements in float64; zeros where a gradient is None."""
    shaped = zip(gradients, SHAPES, strict=True)
    return torch.cat(
        [torch.zeros(math.prod(s)) if g is None else g.double().flatten() for g, s in shaped]
    )


def oracle(first, second, sizes):
    """Signal and noise of two gradients."""
    one, two = flat(first).double(), flat(second).double()
    noise = (one - two).square().sum() / (1 / sizes[0] + 1 / sizes[1])
    return pytest.approx((float(one @ two), float(noise)), rel=1e-9, abs=1e-9)


def values(step):
    return step.grad_sqnorm, step.grad_variance


def compared(pairs, parameters, first, second, sizes=(8, 8), scales=(1.0, 1.0)):
    assert pairs.add(parameters, first, sizes[0], scales[0]) is None
    sums = pairs.add(parameters, second, sizes[1], scales[1])
    return None if sums is None else pairs.statistics(sums.tolist())


@pytest.mark.parametrize("sizes", [(8, 8), (8, 12), (64, 32), (2.5, 4.0)])
def test_signal_and_noise_are_those_of_two_micro_batches(sizes):
    first, second = draw(0), draw(1)
    step = compared(ConsecutiveSteps(), weights(), first, second, sizes)
    assert oracle(first, second, sizes) == values(step)
    assert (sizes[1], 2, "consecutive steps") == (step.samples, step.micro_batches, step.compared)
    assert step.layers == {}
    assert step.interval is None


def test_a_gradient_that_is_none_is_zero():
    first, second = draw(0), draw(1)
    first[0] = second[1] = first[2] = second[2] = None
    step = compared(ConsecutiveSteps(), weights(), first, second)
    assert oracle(first, second, (8, 8)) == values(step)
    nothing = compared(ConsecutiveSteps(), weights(), [None] * 4, [None] * 4)
    assert (0.0, 0.0) == values(nothing)


def test_each_layer_has_its_own_statistics():
    parameters, first, second = weights(), draw(0), draw(1)
    layers = {parameters[0]: "a", parameters[1]: "b", parameters[2]: "a"}
    step = compared(ConsecutiveSteps(layers), parameters, first, second)
    assert ["a", "b", "others"] == list(step.layers)
    for name, numbers in (("a", (0, 2)), ("b", (1,)), ("others", (3,))):
        one, two = (
            [g if i in numbers else None for i, g in enumerate(gradients)]
            for gradients in (first, second)
        )
        assert oracle(one, two, (8, 8)) == values(step.layers[name])
        assert "consecutive steps" == step.layers[name].compared
    assert oracle(first, second, (8, 8)) == values(step)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_each_step_may_have_its_own_scale(as_tensors):
    first, second, scales = draw(0), draw(1), (4.0, 0.5)
    scaled = [
        [scale * g for g in gradients]
        for scale, gradients in zip(scales, (first, second), strict=True)
    ]
    given = [torch.tensor(s, dtype=torch.float64) if as_tensors else s for s in scales]
    step = compared(ConsecutiveSteps(), weights(), *scaled, scales=given)
    assert oracle(first, second, (8, 8)) == values(step)


def test_the_scale_of_a_grad_scaler_needs_no_wait():
    scaler = GradScaler("cpu", init_scale=1024.0)
    first, second, pairs = draw(0), draw(1), ConsecutiveSteps()
    parameters, one = weights(), torch.ones((), dtype=torch.float64)
    with Recorded() as seen:
        pairs.add(parameters, [1024 * g for g in first], 8, scaler.scale(one))
        sums = pairs.add(parameters, [1024 * g for g in second], 8, scaler.scale(one))
    assert {} == seen.waits
    assert oracle(first, second, (8, 8)) == values(pairs.statistics(sums.tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_summed_in_float32_at_least(dtype):
    first, second = draw(0, dtype), draw(1, dtype)
    step = compared(ConsecutiveSteps(), weights(dtype), first, second)
    one, two = flat(first), flat(second)
    length = float(one.norm() * two.norm())
    assert pytest.approx(float(one @ two), abs=1e-5 * length) == step.grad_sqnorm
    assert pytest.approx(4 * float((one - two).square().sum()), rel=1e-5) == step.grad_variance


def test_a_gradient_in_another_memory_format_is_the_same_gradient():
    own = torch.Generator().manual_seed(3)
    first, second = (torch.randn(2, 3, 4, 5, generator=own, dtype=torch.float64) for _ in range(2))
    parameters = [torch.zeros_like(first)]
    plain = compared(ConsecutiveSteps(), parameters, [first], [second])
    channels_last = second.to(memory_format=torch.channels_last)
    other = compared(ConsecutiveSteps(), parameters, [first], [channels_last])
    assert pytest.approx(values(plain), rel=1e-12) == values(other)


def test_the_gradients_that_are_given_are_not_changed():
    first, second = draw(0), draw(1)
    compared(ConsecutiveSteps(), weights(), first, second)
    assert all(map(torch.equal, [*first, *second], [*draw(0), *draw(1)]))


def test_two_equal_gradients_have_no_noise_and_two_opposite_ones_no_positive_signal():
    first = draw(0)
    step = compared(ConsecutiveSteps(), weights(), first, draw(0))
    assert pytest.approx(float(flat(first) @ flat(first))) == step.grad_sqnorm
    assert 0 == step.grad_variance
    assert 1.0 == step.similarity
    assert -1 <= compared(ConsecutiveSteps(), weights(), first, [-g for g in first]).similarity < 0


def test_statistics_say_what_they_compare():
    model = torch.nn.Linear(4, 2)
    for groups, expected in ((None, "micro-batches"), (2, "groups")):
        with GradientMeter(model, groups=groups) as meter:
            for _ in range(2):
                model(torch.randn(6, 4)).square().mean().div(2).backward()
            assert expected == meter.read(samples=[6, 6]).compared
        model.zero_grad()


# which steps are compared


def test_pairs_share_no_step():
    pairs, parameters = ConsecutiveSteps(), weights()
    found = [pairs.add(parameters, draw(i), 8) is not None for i in range(6)]
    assert [False, True] * 3 == found


def test_a_step_of_less_than_half_the_samples_starts_another_pair():
    pairs, parameters = ConsecutiveSteps(), weights()
    found = [pairs.add(parameters, draw(i), n) is not None for i, n in enumerate([64, 31, 62, 31])]
    assert [False, False, True, False] == found
    assert pairs.add(parameters, draw(4), 63) is None
    assert pairs.add(parameters, draw(5), 63) is not None


def test_other_trained_parameters_start_another_pair():
    pairs, parameters = ConsecutiveSteps(), weights()
    assert compared(pairs, parameters, draw(0), draw(1)) is not None
    assert pairs.add(parameters, draw(0), 8) is None
    fewer, gradients = parameters[1:], draw(1)[1:]
    assert pairs.add(fewer, gradients, 8) is None
    assert pairs.add(fewer, gradients, 8) is not None
    replaced = weights()  # as many, of the same shapes
    assert pairs.add(parameters, draw(0), 8) is None
    assert pairs.add(replaced, draw(1), 8) is None


def test_a_skipped_step_is_forgotten():
    pairs, parameters = ConsecutiveSteps(), weights()
    spoiled = [torch.full_like(g, math.nan) for g in draw(0)]
    assert pairs.add(parameters, spoiled, 8) is None
    pairs.forget()
    step = compared(pairs, parameters, draw(1), draw(2))
    assert oracle(draw(1), draw(2), (8, 8)) == values(step)
    assert not math.isfinite(compared(pairs, parameters, draw(0), spoiled).grad_variance)
    assert pairs.add(parameters, draw(1), 8) is None  # after the spoiled pair


# a state


def test_a_pair_is_continued_from_a_state_bit_for_bit():
    parameters = weights(torch.float32)
    layers = dict.fromkeys(parameters[:2], "a")
    first, second = draw(0, torch.float32), draw(1, torch.float32)
    first[1] = None
    whole, other = ConsecutiveSteps(layers), ConsecutiveSteps(layers)
    assert whole.state_dict() is None
    whole.add(parameters, first, 8, 3.0)
    other.load_state_dict(through_a_file(whole.state_dict()))
    results = [
        pairs.statistics(pairs.add(parameters, second, 12, 2.0).tolist())
        for pairs in (whole, other)
    ]
    assert results[0] == results[1]
    assert whole.state_dict() is None


def test_a_state_keeps_its_gradient_while_the_pair_is_completed():
    pairs, parameters = ConsecutiveSteps(), weights()
    pairs.add(parameters, draw(0), 8)
    state = pairs.state_dict()
    pairs.add(parameters, draw(1), 8, 2.0)
    assert all(map(torch.equal, draw(0), state["gradients"]))
    for _ in range(2):  # a state may be loaded twice
        pairs.load_state_dict(state)
        sums = pairs.add(parameters, draw(1), 8)
        assert oracle(draw(0), draw(1), (8, 8)) == values(pairs.statistics(sums.tolist()))


def test_a_state_between_two_pairs_starts_a_pair():
    pairs, parameters = ConsecutiveSteps(), weights()
    pairs.add(parameters, draw(0), 8)
    pairs.load_state_dict(None)
    assert pairs.add(parameters, draw(1), 8) is None


# bias


def expectation(lr, mu, hessian, deviations, sizes):
    """The mean estimate of a step of SGD on a quadratic, over all signs of the two errors.

    Sigma is diagonal, with these deviations of a sample's gradient.
    """
    sigma = torch.tensor(deviations, dtype=torch.float64)
    signs = [torch.tensor(s) for s in itertools.product((-1.0, 1.0), repeat=len(deviations))]
    found, weight = [], torch.zeros_like(mu)
    for one, two in itertools.product(signs, repeat=2):
        first = mu + one * sigma / math.sqrt(sizes[0])
        second = mu - lr * hessian @ first + two * sigma / math.sqrt(sizes[1])
        found.append(values(compared(ConsecutiveSteps(), [weight], [first], [second], sizes)))
    return tuple(map(fmean, zip(*found, strict=True)))


MU = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.3, 0.0], [0.0, 2.0, -0.5], [0.2, 0.0, 0.7]], dtype=torch.float64)
HESSIAN = ROOT @ ROOT.T
DEVIATIONS = [3.0, 1.0, 5.0]


@pytest.mark.parametrize("sizes", [(8, 8), (8, 12), (16, 10)])
def test_without_a_step_both_are_unbiased(sizes):
    expected = float(MU @ MU), math.fsum(d * d for d in DEVIATIONS)
    assert pytest.approx(expected) == expectation(0.0, MU, HESSIAN, DEVIATIONS, sizes)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 12), (16, 10)])
@pytest.mark.parametrize("lr", [0.01, 0.2])
def test_a_step_of_sgd_biases_both_as_the_theory_says(lr, sizes):
    n1, n2 = sizes
    sigma = torch.diag(torch.tensor(DEVIATIONS, dtype=torch.float64) ** 2)
    curved = float(torch.trace(HESSIAN @ sigma))
    signal = float(MU @ MU) - lr * (float(MU @ HESSIAN @ MU) + curved / n1)
    moved = lr * HESSIAN @ MU
    squared = float(torch.trace(HESSIAN @ HESSIAN @ sigma))
    excess = (2 * lr * curved + lr**2 * squared) / n1 + float(moved @ moved)
    noise = float(torch.trace(sigma)) + excess / (1 / n1 + 1 / n2)
    assert pytest.approx((signal, noise)) == expectation(lr, MU, HESSIAN, DEVIATIONS, sizes)


# intervals


def coverage(ratio, *, overlapping, runs=250, pairs=48, level=0.9):
    """How often the interval of an average over 16 pairs has the truth; the weights stand still.

    Two comparers that begin one step apart compare every step with the one before it.

    Args:
        ratio: n |mu|^2 / tr(Sigma); the noise is strongest along mu.
        overlapping: whether every step is compared with the one before it.
        runs: number of averages.
        pairs: pairs in each.
        level: nominal coverage.
    """
    own = torch.Generator().manual_seed(5)
    deviations = torch.tensor([5.0, *[1.0] * 99], dtype=torch.float64)
    n, variance = 16.0, float(deviations.square().sum())
    mu = torch.zeros_like(deviations)
    mu[0] = math.sqrt(ratio * variance / n)
    truth, parameters, covered = math.log(1 + ratio), [torch.zeros_like(mu)], 0
    for _ in range(runs):
        average = NoiseAverage(16, "steps", confidence=level)
        comparers = [ConsecutiveSteps() for _ in range(1 + overlapping)]
        for step in range(pairs * (2 - overlapping) + 1):
            error = torch.randn(len(mu), generator=own, dtype=torch.float64) / math.sqrt(n)
            for late, comparer in enumerate(comparers):
                gradient = mu + deviations * error
                sums = comparer.add(parameters, [gradient], n) if step >= late else None
                if sums is not None:
                    found = average.update(comparer.statistics(sums.tolist()))
        covered += found.interval.low <= truth <= found.interval.high
    return covered / runs


@pytest.mark.parametrize("ratio", [0.1, 1.0, 4.0])
def test_the_interval_of_an_average_of_pairs_covers_the_truth(ratio):
    # three binomial deviations of 250 runs at .9 are .057
    assert pytest.approx(0.9, abs=0.06) == coverage(ratio, overlapping=False)


def test_pairs_that_shared_a_step_would_have_too_narrow_an_interval():
    assert coverage(1.0, overlapping=True) < 0.75


def test_a_single_pair_has_no_interval():
    step = compared(ConsecutiveSteps(confidence=0.9), weights(), draw(0), draw(1))
    assert (-1.0, 1.0) == step.similarity_interval
    assert (0.9, "step") == (step.interval.level, step.interval.covers)
