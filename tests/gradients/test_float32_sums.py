"""`accumulate_float32_above`: the gradient of a step is that of float64 sums, rounded once."""

import warnings
from functools import partial
from itertools import islice

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients import GradientSource
from bigbatch.optim import VRSGD

MICRO = 4  # samples
HALF = [torch.bfloat16, torch.float16]


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)


class Sometimes(nn.Module):
    """Uses a layer in every other forward, and not in the last of an even number."""

    def __init__(self):
        super().__init__()
        self.body, self.extra, self.forwards = network(), nn.Linear(5, 5).bfloat16(), 0

    def forward(self, x):
        self.forwards += 1
        logits = self.body(x)
        return self.extra(logits) if self.forwards % 2 else logits


def samples(count, rank=0):
    draw = torch.Generator(device="cpu").manual_seed(1 + rank)
    x = torch.randn(count, 16, generator=draw, device="cpu") + 0.5
    return TensorDataset(x, torch.randint(5, (count,), generator=draw, device="cpu"))


def loss_of(model, batch):
    x, y = (tensor.to(torch.get_default_device()) for tensor in batch)
    parameter = next(iter(model.parameters()))
    return cross_entropy(model(x.to(parameter.dtype)).float(), y)


def loop(model, k, above, *, rank=0, ranks=1, optimizer=None, steps=1, **options):
    data = samples(steps * k * MICRO, rank)
    loader = DataLoader(data, batch_size=MICRO)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    return bb.AdaptiveBatch(
        model,
        optimizer,
        loader,
        policy=bb.Fixed(k * MICRO * ranks),
        micro_batch=MICRO,
        accumulate_float32_above=above,
        **options,
    )


def gradient(model, k, above, *, rank=0, ranks=1, **options):
    """`.grad` of a step, the float64 sum of its backwards' own gradients, and its record."""
    train = loop(model, k, above, rank=rank, ranks=ranks, **options)
    parameters = list(model.parameters())
    (step,) = list(_steps(train))
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    rows = []
    for batch in step:
        loss = loss_of(model, batch)
        own = torch.autograd.grad(
            loss / k, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append([h.double() for h in own])
        for total, h in zip(exact, own, strict=True):
            total += h
        step.backward(loss)
    grads = [p.grad.double().cpu() for p in parameters]
    record = step.update()
    return flat(grads), flat(exact), [flat(row) for row in rows], record


def _steps(train):
    for step in train:
        yield step
        return


def flat(tensors):
    return torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors])


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("every", [0, 1], ids=["not measured", "measured"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("k", [4, 64, 256])
def test_the_gradient_is_rounded_once_however_many_backwards_there_are(k, dtype, every):
    actual, exact, *_ = gradient(network(dtype), k, 0, every=every)
    once = error(exact.to(dtype).double(), exact)  # by as much as one backward's
    assert error(actual, exact) <= 1.01 * once + 1e-6


@pytest.mark.parametrize(("k", "grown"), [(4, 0.0028), (64, 0.0092), (256, 0.0192)])
def test_the_error_that_it_avoids_grows_with_the_backwards(k, grown):
    plain, exact, *_ = gradient(network(), k, None, every=0)
    summed, *_ = gradient(network(), k, 0, every=0)
    assert error(plain, exact) == pytest.approx(grown, rel=0.1)
    assert error(summed, exact) == pytest.approx(0.0017, rel=0.1)


def test_autograd_rounds_in_every_backward():
    plain, exact, *_ = gradient(network(), 256, None, every=0)
    assert error(plain, exact) > 3 * error(exact.bfloat16().double(), exact)


def test_a_step_of_no_more_backwards_than_that_is_torchs_own():
    above, plain = (gradient(network(), 8, above, every=0)[0] for above in (8, None))
    assert torch.equal(plain, above)


def test_statistics_are_those_of_the_gradients_that_were_seen():
    k = 64
    _, g, rows, record = gradient(network(), k, 0, every=1)
    total = k * MICRO
    # h_d = n_d g_d / N, so g_d = k h_d; noise = (A - N |G|^2) / (k - 1)
    a = sum(MICRO * float((k * row).square().sum()) for row in rows)
    noise = (a - total * float(g.square().sum())) / (k - 1)
    found = record.statistics
    assert pytest.approx(noise, rel=1e-3) == found.grad_variance
    signal = float(g.square().sum()) - noise / total
    # |G|^2 is that of the rounded gradient, which is off by 2^-9 an element at random
    assert pytest.approx(signal, rel=2e-3) == found.grad_sqnorm


def reduced_gradient(model, k, **options):
    """r g, which a VRSGD steps by, and the gradients of the backwards of this rank."""
    optimizer, stepped = VRSGD(model.parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: stepped.clear())
    optimizer.register_step_post_hook(
        lambda *_: stepped.append(flat([p.grad.double() for p in model.parameters()]))
    )
    rows = gradient(model, k, 0, optimizer=optimizer, **options)[2]
    return stepped[0], torch.stack(rows)


def expected_reduced_gradient(h, model):
    """r g of gradients (k, P) of equal weight, whose sum is g; r by layer."""
    g, variance = h.sum(0), (len(h) * h - h.sum(0)).square().mean(0)
    r = (g.square() / variance).nan_to_num(0.0, 0.0, 0.0)
    layers = r.split([p.numel() for p in model.parameters()])
    return g * torch.cat([(layer / layer.mean()).clamp(0.1, 1.0) for layer in layers])


def test_a_variance_reduced_step_is_r_times_the_float64_gradient():
    model = network()
    actual, h = reduced_gradient(model, 32)
    assert error(actual, expected_reduced_gradient(h, model)) < 4e-3  # two roundings to bfloat16


def test_several_steps_train_as_float32_sums_by_hand():
    k, steps, lr = 16, 3, 0.5
    model, other = network(), network()
    train = loop(model, k, 0, optimizer=torch.optim.SGD(model.parameters(), lr=lr), steps=steps)
    for step in train:
        for batch in step:
            step.backward(loss_of(model, batch))
        step.update()
    optimizer = torch.optim.SGD(other.parameters(), lr=lr)
    batches = list(DataLoader(samples(steps * k * MICRO), batch_size=MICRO))
    parameters = list(other.parameters())
    for start in range(0, steps * k, k):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for batch in batches[start : start + k]:
            own = torch.autograd.grad(loss_of(other, batch) / k, parameters)
            for total, h in zip(sums, own, strict=True):
                total += h
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.to(p.dtype)
        optimizer.step()
    for one, two in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(one, two)


def test_groups_of_samples_are_measured_as_without():
    (_, _, _, without), (actual, exact, _, record) = (
        gradient(network(), 8, above, groups=2, every=1) for above in (None, 0)
    )
    assert error(actual, exact) <= 1.01 * error(exact.bfloat16().double(), exact)
    assert without.micro_batches == record.micro_batches == 8
    # of the rounded sum in the one, and not in the other
    noise = without.statistics.grad_variance
    assert pytest.approx(noise, rel=1e-2) == record.statistics.grad_variance


def test_memory_of_sums_is_there_in_the_step_alone():
    model = network()
    train = loop(model, 8, 0, every=0)
    (step,) = list(_steps(train))
    source: GradientSource = train.meter.source
    for batch in step:
        step.backward(loss_of(model, batch))
    assert all(source.float32_sums.of(p).dtype is torch.float32 for p in model.parameters())
    step.update()
    assert all(source.float32_sums.of(p) is None for p in model.parameters())


def test_hooks_of_the_users_own_see_each_backwards_gradient():
    model, seen = network(), []
    model[0].bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    actual, exact, *_ = gradient(model, 16, 0, every=1)
    own = seen[1::2]  # of step.backward, after the test's own
    assert 16 == len(own)
    assert error(actual, exact) <= 1.01 * error(exact.bfloat16().double(), exact)


def test_a_backward_of_the_users_own_within_a_step_is_refused_as_ever():
    model = network()
    (step,) = list(_steps(loop(model, 4, 0, every=1)))
    batches = iter(step)
    for batch in islice(batches, 2):
        step.backward(loss_of(model, batch))
    loss_of(model, batch).backward()
    with pytest.raises(GradientError, match="was changed between the last counted backward"):
        step.backward(loss_of(model, next(batches)))


# where it cannot work


def test_gradients_with_graphs_are_refused():
    model = network()
    (step,) = list(_steps(loop(model, 4, 0, every=0)))
    loss = loss_of(model, next(iter(step)))
    with (
        pytest.raises(GradientError, match="leave create_graph=True out"),
        step.weighted_backward(loss),
    ):
        loss.backward(create_graph=True)


def test_float32_parameters_need_no_float32_sums_and_that_is_said():
    with pytest.warns(UserWarning, match="changes nothing: no parameter"):
        loop(network(torch.float32), 4, 0)


def on_sharded(rank, ranks):
    model = fully_shard(network())
    with pytest.raises(SettingError) as refused:
        loop(model, 4, 0, ranks=ranks)
    return str(refused.value)


@pytest.mark.cpu
def test_fully_shard_adds_up_itself(ranks):
    for message in ranks(2)(on_sharded):
        assert "reduce_dtype=torch.float32" in message
        assert "leave it out" in message


# on ranks


def on_rank(rank, ranks, *, k, above, options, every):
    torch.manual_seed(0)
    model = Sometimes() if options else network()
    model = DistributedDataParallel(model, **options)
    warnings.simplefilter("ignore")  # about equal batches
    actual, exact, *_ = gradient(model, k, above, rank=rank, ranks=ranks, every=every)
    return actual, exact


OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@pytest.mark.cpu
@pytest.mark.parametrize("every", [0, 1], ids=["not measured", "measured"])
@pytest.mark.parametrize("options", OPTIONS)
def test_each_rank_rounds_its_sum_once_before_ddp_reduces_it(ranks, options, every):
    run = partial(on_rank, k=64, above=0, options=OPTIONS[options], every=every)
    (first, own), (second, other) = ranks(2)(run)
    assert torch.equal(first, second)
    # each half is rounded, then their sum
    exact = (own + other) / 2
    once = error(exact.bfloat16().double(), exact)
    assert error(first, exact) <= 2 * once


def varied_on_rank(rank, ranks):
    model = DistributedDataParallel(network())
    return reduced_gradient(model, 16, rank=rank, ranks=ranks)


@pytest.mark.cpu
def test_a_variance_reduced_step_under_ddp_is_r_times_the_float64_gradient(ranks):
    (actual, own), (_, other) = ranks(2)(varied_on_rank)
    expected = expected_reduced_gradient(torch.cat([own, other]) / 2, network())
    assert error(actual, expected) < 8e-3  # M2 is sent in bfloat16
