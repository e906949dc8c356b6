"""GradientMeter in the loops that people write, with real models and real backwards."""

import contextlib
import copy
import gc
import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from bigbatch import GradientMeter
from bigbatch.errors import GradientError, SettingError
from oracles import noise as oracle
from single_process_training import (
    RAGGED,
    Fails,
    accumulate,
    data,
    expected_of,
    network,
    right_or_refused,
    same,
    shares,
)

torch.set_num_threads(1)  # small tensors: a second thread only waits
EQUAL = [4, 4, 4, 4]


def feed(parameter, gradient):
    """One backward whose gradient is `gradient`."""
    (parameter * torch.as_tensor(gradient, dtype=parameter.dtype)).sum().backward()


# right numbers


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("sizes", [EQUAL, RAGGED, [5, 2]])
def test_a_step_gives_the_oracles_numbers(loss, sizes):
    model, batches = network(), data(sizes)
    with GradientMeter(model, loss=loss) as meter:
        accumulate(model, batches, loss)
        actual = meter.read(samples=sizes)
    assert same(expected_of(model, batches, loss), actual)
    assert (sum(sizes), len(sizes)) == (actual.samples, actual.micro_batches)


def test_small_gradients_are_read_together_and_large_ones_by_themselves():
    draw = torch.Generator().manual_seed(0)
    sizes = [1 << 14] * 20 + [1, 0, (1 << 14) + 1, 300]  # more than are held at once
    leaves = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in sizes]
    leaves += [nn.Parameter(torch.zeros(7, 5))]  # of another type
    gradients = [
        [torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) for p in leaves]
        for _ in range(3)
    ]
    with GradientMeter(leaves) as meter:
        for of_each in gradients:
            torch.autograd.backward([(p * g).sum() for p, g in zip(leaves, of_each, strict=True)])
        measured = meter.read([2, 3, 5])
    rows = torch.stack([torch.cat([g.double().flatten() for g in row]) for row in gradients])
    means = rows * 10 / torch.tensor([2, 3, 5])[:, None]  # what was added is n_d / N times these
    assert same(oracle.weighted(means, [2, 3, 5]), measured, rel=1e-7)


def test_every_step_is_measured_by_itself():
    model = network()
    meter = GradientMeter(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for sizes in (EQUAL, RAGGED, [5, 2]):
        expected = expected_of(model, data(sizes))
        accumulate(model, data(sizes))
        assert same(expected, meter.read(sizes))
        optimizer.step()
        optimizer.zero_grad(set_to_none=sizes is EQUAL)  # both ways to empty it


def test_steps_that_nobody_reads_do_not_add_up():
    model = network()
    meter = GradientMeter(model)
    for _ in range(3):
        model.zero_grad()
        accumulate(model, data(RAGGED))
    assert same(expected_of(model, data(RAGGED)), meter.read(RAGGED))


@pytest.mark.parametrize("inside", [False, True])
def test_measuring_leaves_the_gradient_bit_for_bit(inside):
    measured, plain = network(torch.float32), network(torch.float32)
    meter = GradientMeter(measured)
    for x, y in data(EQUAL, dtype=torch.float32):
        cross_entropy(plain(x), y).backward()
        if inside:
            with meter.micro_batch():
                cross_entropy(measured(x), y).backward()
        else:
            cross_entropy(measured(x), y).backward()
    expected = [p.grad for p in plain.parameters()]
    assert all(map(torch.equal, expected, (p.grad for p in measured.parameters())))


@pytest.mark.parametrize("factor", [1e-6, 8.0, 1e6])
def test_a_factor_on_the_loss_is_squared_in_signal_and_noise_and_leaves_similarity(factor):
    steps = []
    for c in (1.0, factor):
        model = network()
        with GradientMeter(model) as meter:
            for x, y in data(EQUAL):
                (c * cross_entropy(model(x), y) / 4).backward()
            steps.append(meter.read(EQUAL))
    one, scaled = steps
    assert pytest.approx(one.grad_sqnorm * factor**2) == scaled.grad_sqnorm
    assert pytest.approx(one.grad_variance * factor**2) == scaled.grad_variance
    assert pytest.approx(one.similarity) == scaled.similarity


# float32: sums of 50 squares; bfloat16: `.grad` is rounded to 1 part in 256 at every addition
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_narrow_parameters_are_measured_as_their_gradients_are(dtype, rel):
    model, batches = network(dtype), data(RAGGED, dtype)
    with GradientMeter(model) as meter:
        accumulate(model, batches)
        assert same(expected_of(model, batches), meter.read(RAGGED), rel)


@pytest.mark.parametrize("value", [1024.0, 2.0**-13])  # squares beyond 65504 and below 2^-24
def test_half_gradients_whose_squares_leave_the_half_range_are_measured(value):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    with GradientMeter([weight]) as meter:
        feed(weight, [value, 0.0])
        feed(weight, [0.0, value])
        step = meter.read([1, 1])
    # norms of float32: 1 part in 10^7
    assert pytest.approx((0.0, 4 * value**2), rel=1e-6, abs=1e-6 * value**2) == (
        step.grad_sqnorm,
        step.grad_variance,
    )


def test_equal_bfloat16_micro_batches_agree_although_their_sum_is_rounded():
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    x = torch.randn(4, 4).bfloat16()
    with GradientMeter(model) as meter:
        for _ in range(64):
            (model(x).square().mean() / 64).backward()
        # 64 additions, each rounded to 1 part in 512 at most
        assert pytest.approx(1.0, abs=0.1) == meter.read([4] * 64).similarity


# models that are not plain


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model, batches = Tied().double(), data(RAGGED)
    with GradientMeter(model) as meter:
        accumulate(model, batches)
        assert same(expected_of(model, batches), meter.read(RAGGED))


def test_frozen_parameters_are_left_out():
    model, batches = network(), data(EQUAL)
    model[0].requires_grad_(False)
    with GradientMeter(model) as meter:
        accumulate(model, batches)
        assert same(expected_of(model, batches), meter.read(EQUAL))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_parameter_that_is_unfrozen_between_steps_is_measured_or_refused(layer):
    model = network()
    model[layer].bias.requires_grad_(False)
    meter = GradientMeter(model)
    accumulate(model, data(EQUAL))
    meter.read(EQUAL)
    model.zero_grad()
    model[layer].bias.requires_grad_(True)

    def measure():
        accumulate(model, data(EQUAL))
        return meter.read(EQUAL)

    assert right_or_refused(expected_of(model, data(EQUAL)), measure)


def test_a_parameter_that_is_unfrozen_is_measured_inside_micro_batch():
    model = network()
    model[0].requires_grad_(False)
    meter = GradientMeter(model)
    model[0].requires_grad_(True)
    expected = expected_of(model, data(EQUAL))
    for x, y in data(EQUAL):
        with meter.micro_batch():
            (cross_entropy(model(x), y) / 4).backward()
    assert same(expected, meter.read(EQUAL))


def test_scalars_and_empty_parameters_are_measured():
    scalar = nn.Parameter(torch.zeros((), dtype=torch.float64))
    empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    with GradientMeter([scalar, empty]) as meter:
        for _ in range(2):
            for gradient in (1.0, 3.0):
                (scalar * gradient / 2 + empty.sum()).backward()
            step = meter.read([8, 8])
            assert (3.0, 16.0) == (step.grad_sqnorm, step.grad_variance)
            scalar.grad.zero_()  # the second step begins on zeros and on a gradient of no element


# what is one micro-batch


def two_losses(model, x, y):
    return cross_entropy(model(x), y), model(x).square().mean()


def test_two_losses_are_one_micro_batch_inside_micro_batch():
    model, batches = network(), data(RAGGED)
    expected = expected_of(model, batches, loss_of=lambda m, x, y: sum(two_losses(m, x, y)))
    meter = GradientMeter(model)
    for (x, y), share in zip(batches, shares(batches, "weighted"), strict=True):
        with meter.micro_batch():
            for loss in two_losses(model, x, y):
                (loss * share).backward()
    assert same(expected, meter.read(RAGGED))


def test_marked_and_unmarked_micro_batches_make_one_step():
    model, batches = network(), data(RAGGED)
    meter = GradientMeter(model)
    for d, ((x, y), share) in enumerate(zip(batches, shares(batches, "weighted"), strict=True)):
        with meter.micro_batch() if d % 2 else contextlib.nullcontext():
            (cross_entropy(model(x), y) * share).backward()
    assert same(expected_of(model, batches), meter.read(RAGGED))


def test_two_losses_without_micro_batch_are_refused():
    model = network()
    meter = GradientMeter(model)
    for x, y in data(EQUAL):
        for loss in two_losses(model, x, y):
            loss.backward()
    with pytest.raises(GradientError, match=r"8 backwards.*4 sizes.*micro_batch"):
        meter.read(EQUAL)


# four equal micro-batches have this sum too, and so have eight
@pytest.mark.parametrize("total", [32, 32.0, np.int64(32), torch.tensor(32), "32"])
def test_a_sum_of_sizes_is_refused_and_the_list_asked_for(total):
    sizes = [12, 4, 8, 8]
    model, batches = network(), data(sizes)
    meter = GradientMeter(model)
    accumulate(model, batches)
    with pytest.raises(GradientError, match=r"read\(samples=\[8\] \* 4\).*4 backwards"):
        meter.read(samples=total)
    assert same(expected_of(model, batches), meter.read(samples=sizes))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        if self.reentrant is None:
            return self.body(hidden)
        return checkpoint(self.body, hidden, use_reentrant=self.reentrant)


def test_checkpointing_that_is_not_reentrant_counts_once():
    model = Checkpointed(reentrant=False)
    with GradientMeter(model) as meter:
        accumulate(model, data(RAGGED))
        actual = meter.read(RAGGED)
    assert same(expected_of(Checkpointed(None), data(RAGGED)), actual)


def test_reentrant_checkpointing_counts_once_inside_micro_batch():
    model, batches = Checkpointed(reentrant=True), data(RAGGED)
    meter = GradientMeter(model)
    for (x, y), share in zip(batches, shares(batches, "weighted"), strict=True):
        with meter.micro_batch():
            (cross_entropy(model(x), y) * share).backward()
    assert same(expected_of(Checkpointed(None), batches), meter.read(RAGGED))


def test_reentrant_checkpointing_without_micro_batch_is_refused_or_right():
    model = Checkpointed(reentrant=True)
    meter = GradientMeter(model)
    expected = expected_of(Checkpointed(None), data(EQUAL))

    def measure():
        accumulate(model, data(EQUAL))
        return meter.read(EQUAL)

    assert right_or_refused(expected, measure)


def with_gradient_penalty(model, x, y):
    loss = cross_entropy(model(x), y)
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(part.square().sum() for part in parts)


def test_a_gradient_penalty_inside_micro_batch_counts_what_reaches_the_gradient():
    model, batches = network(), data(EQUAL)
    expected = expected_of(model, batches, loss_of=with_gradient_penalty)
    meter = GradientMeter(model)

    def measure():
        for x, y in batches:
            with meter.micro_batch():
                (with_gradient_penalty(model, x, y) / 4).backward()
        return meter.read(EQUAL)

    assert right_or_refused(expected, measure)


def test_autograd_grad_over_the_parameters_is_no_micro_batch():
    model, batches = network(), data(EQUAL)
    meter = GradientMeter(model)
    for batch in batches:
        before = [p.grad for p in model.parameters()]
        torch.autograd.grad(mean_of(model, batch), list(model.parameters()))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
        (mean_of(model, batch) / len(batches)).backward()
    assert same(expected_of(model, batches), meter.read(EQUAL))


def test_a_micro_batch_inside_a_micro_batch_is_refused_or_one():
    model, batches = network(), data(EQUAL)
    meter = GradientMeter(model)

    def measure():
        for x, y in batches:
            with meter.micro_batch(), meter.micro_batch():
                (cross_entropy(model(x), y) / 4).backward()
        return meter.read(EQUAL)

    assert right_or_refused(expected_of(model, batches), measure)


def test_gradients_of_the_inputs_are_no_micro_batch():
    model, batches = network(), data(EQUAL)
    meter = GradientMeter(model)
    for x, y in batches:
        x = x.clone().requires_grad_()
        torch.autograd.grad(cross_entropy(model(x), y), x)
        (cross_entropy(model(x.detach()), y) / 4).backward()
    assert same(expected_of(model, batches), meter.read(EQUAL))


def test_zeroing_halfway_starts_the_step_again():
    model, batches = network(), data(RAGGED)
    meter = GradientMeter(model)
    accumulate(model, data([7, 7]))
    model.zero_grad()
    accumulate(model, batches)
    assert same(expected_of(model, batches), meter.read(RAGGED))


def broken_loss_after_a_backward(loss):
    loss.backward()
    raise KeyError


def test_a_micro_batch_that_raised_is_forgotten():
    model, batches = network(), data(EQUAL)
    meter = GradientMeter(model)
    x, y = batches[0]
    with pytest.raises(KeyError), meter.micro_batch():
        broken_loss_after_a_backward(100 * cross_entropy(model(x), y))
    model.zero_grad()
    accumulate(model, batches)
    assert same(expected_of(model, batches), meter.read(EQUAL))


# refusals; each leaves a meter that measures the next step as if nothing had happened


def gradients_left_from_before(model, meter):
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-30)
    accumulate(model, data(EQUAL))


def clipping_before_read(model, meter):
    accumulate(model, data(EQUAL))
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # far from active
    meter.read(EQUAL)


def clipping_between_two_micro_batches(model, meter):
    accumulate(model, data([4]))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    accumulate(model, data([4]))


def zero_grad_before_read(model, meter):
    accumulate(model, data(EQUAL))
    model.zero_grad()
    meter.read(EQUAL)


def zero_filling_before_read(model, meter):
    accumulate(model, data(EQUAL))
    model.zero_grad(set_to_none=False)
    meter.read(EQUAL)


def zero_filling_halfway(model, meter):
    accumulate(model, data(EQUAL))
    model.zero_grad(set_to_none=False)
    accumulate(model, data(EQUAL)[:3])
    meter.read([4, 4, 4, 4])


def zero_grad_halfway(model, meter):
    accumulate(model, data(EQUAL)[:2])
    model.zero_grad()
    accumulate(model, data(EQUAL)[2:])
    meter.read(EQUAL)


def too_few_sizes(model, meter):
    accumulate(model, data(EQUAL))
    meter.read([4, 4, 4])


def a_sum(model, meter):
    accumulate(model, data(EQUAL))
    meter.read(16)


def mean_of(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def one_micro_batch(model, meter):
    accumulate(model, data([4]))
    meter.read([4])


def no_micro_batch(model, meter):
    meter.read(EQUAL)


def a_backward_of_ones_own(model, meter):
    x, y = data(EQUAL)[0]
    cross_entropy(model(x.clone().requires_grad_()), y).backward()  # adversarial inputs, say
    accumulate(model, data(EQUAL))
    meter.read(EQUAL)


REFUSED = [
    (gradients_left_from_before, "not empty before the first backward"),
    (clipping_before_read, "changed between the last counted backward and read"),
    (clipping_between_two_micro_batches, "changed between the last counted backward"),
    (zero_grad_before_read, "changed between the last counted backward and read"),
    (zero_filling_before_read, "changed between the last counted backward and read"),
    (zero_filling_halfway, "3 backwards were seen but 4 sizes"),
    (zero_grad_halfway, r"2 backwards were seen but 4 sizes stated; zero_grad\(\) between"),
    (too_few_sizes, "4 backwards were seen but 3 sizes"),
    (a_sum, r"samples=16 must be .* size of each micro-batch: `read\(samples=\[8\] \* 4\)`"),
    (one_micro_batch, "1 micro-batch seen, noise needs at least 2"),
    (no_micro_batch, "0 micro-batch"),
    (a_backward_of_ones_own, "5 backwards were seen but 4 sizes"),
]


@pytest.mark.parametrize(
    ("mistake", "words"), REFUSED, ids=lambda row: getattr(row, "__name__", "")
)
def test_a_mistake_is_refused_and_does_not_spoil_the_next_step(mistake, words):
    model = network()
    meter = GradientMeter(model)
    with pytest.raises(GradientError, match=words):
        mistake(model, meter)
    model.zero_grad()
    accumulate(model, data(RAGGED))
    assert same(expected_of(model, data(RAGGED)), meter.read(RAGGED))


@pytest.mark.parametrize("before", [0, 1])
def test_a_backward_that_failed_is_forgotten_once_the_gradients_are_zeroed(before):
    """Twenty times, since on a device autograd drops it in another thread, sooner or later."""
    model, micro = network(), data(EQUAL)
    meter = GradientMeter(model)
    expected = expected_of(model, micro)
    for _ in range(20):
        accumulate(model, micro[:before])
        with pytest.raises(MemoryError):
            model[2](Fails.apply(model[0](micro[0][0]))).sum().backward()
        model.zero_grad()
        accumulate(model, micro)
        assert same(expected, meter.read(EQUAL))
        model.zero_grad()


def test_after_a_backward_that_failed_the_step_does_not_continue():
    model, micro = network(), data(EQUAL)
    meter = GradientMeter(model)
    accumulate(model, micro[:1])
    with pytest.raises(MemoryError):
        model[2](Fails.apply(model[0](micro[0][0]))).sum().backward()
    with pytest.raises(GradientError, match=r"\.grad is not empty"):
        accumulate(model, micro[1:])
    meter.close()


def test_reading_twice_is_refused():
    model = network()
    meter = GradientMeter(model)
    accumulate(model, data(EQUAL))
    meter.read(EQUAL)
    with pytest.raises(GradientError):
        meter.read(EQUAL)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_gives_no_finite_number(bad):
    weight = nn.Parameter(torch.zeros(3))
    with GradientMeter([weight]) as meter:
        feed(weight, [1.0, bad, 0.0])
        feed(weight, [1.0, 0.0, 0.0])
        step = meter.read([4, 4])
    assert math.isnan(step.similarity)
    assert not math.isfinite(step.noise_scale)


def test_bad_settings_fail_at_construction():
    with pytest.raises(SettingError, match=r'loss=.sum.*"weighted", "mean"'):
        GradientMeter(network(), loss="sum")
    with pytest.raises(SettingError, match="nothing to measure"):
        GradientMeter(network().requires_grad_(False))
    with pytest.raises(SettingError, match="nothing to measure"):
        GradientMeter(nn.Tanh())


def test_more_than_one_rank_is_refused():
    model = network()
    meter = GradientMeter(model)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(GradientError, match="2 ranks"):
            accumulate(model, data(EQUAL))
    finally:
        dist.destroy_process_group()
    model.zero_grad()
    accumulate(model, data(EQUAL))
    assert same(expected_of(model, data(EQUAL)), meter.read(EQUAL))


# hooks


def hooks_on(model):
    return sum(len(p._backward_hooks or ()) for p in model.parameters())  # torch has no public way


def test_two_meters_on_one_model_do_not_disturb_each_other():
    model, batches = network(), data(RAGGED)
    first, second = GradientMeter(model), GradientMeter(model)
    accumulate(model, batches)
    expected = expected_of(model, batches)
    assert same(expected, first.read(RAGGED))
    assert same(expected, second.read(RAGGED))
    model.zero_grad()
    first.close()
    accumulate(model, batches)
    assert same(expected, second.read(RAGGED))


def test_close_takes_the_hooks_off():
    model = network()
    with GradientMeter(model) as meter:
        assert hooks_on(model) == 4
    assert hooks_on(model) == 0
    accumulate(model, data(EQUAL))
    accumulate(model, data(EQUAL))  # on a dirty gradient: a meter that still watched would refuse
    meter.close()  # a second time does no harm
    with pytest.raises(GradientError):
        meter.read(EQUAL)


def test_a_meter_that_nobody_holds_leaves_no_hooks():
    model = network()
    meter = GradientMeter(model)
    accumulate(model, data(EQUAL))
    meter.read(EQUAL)
    model.zero_grad()
    with meter.micro_batch():
        accumulate(model, data([4]))
    assert hooks_on(model) == 4
    del meter
    gc.collect()
    assert hooks_on(model) == 0


def test_a_watched_model_can_be_copied_and_saved_without_a_warning():
    model, plain = network(), torch.zeros(3, requires_grad=True)
    meter, other = GradientMeter(model), GradientMeter([plain])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model, io.BytesIO())
        torch.save(plain, io.BytesIO())  # torch warns of hooks on tensors that are no Parameter
        clone = copy.deepcopy(model)
    other.close()
    accumulate(clone, data(EQUAL))  # not watched
    accumulate(model, data(EQUAL))
    assert same(expected_of(model, data(EQUAL)), meter.read(EQUAL))


def test_a_model_whose_only_trained_parameter_is_empty_has_no_number():
    nothing = nn.Parameter(torch.zeros(0))
    with GradientMeter([nothing]) as meter:
        for _ in range(2):
            nothing.sum().backward()
        assert math.isnan(meter.read([1, 1]).similarity)


def test_a_parameter_that_is_unfrozen_within_a_step_counts_from_then_on():
    model, batches = network(), data(EQUAL)
    late = next(model.parameters()).requires_grad_(False)
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    sums = [zeros]
    with GradientMeter(model) as meter:
        for number, batch in enumerate(batches[:2]):
            late.requires_grad_(number == 1)
            (mean_of(model, batch) / 2).backward()
            grads = [p.grad for p in model.parameters()]
            sums.append([z if g is None else g.clone() for z, g in zip(zeros, grads, strict=True)])
        statistics = meter.read([4, 4])

    def sqnorm(total, before=zeros):
        return sum(float((a - b).square().sum()) for a, b in zip(total, before, strict=True))

    of_both = sqnorm(sums[1]) + sqnorm(sums[2], sums[1])
    expected = 16 * of_both - 8 * sqnorm(sums[2])
    assert pytest.approx(expected, rel=1e-5) == statistics.grad_variance
