"""Variance-reduced optimizers under DDP: the step of one process, at the bytes of an all-reduce."""

import contextlib
import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from bigbatch import GradientMeter
from bigbatch.errors import GradientError, SettingError, StateError
from bigbatch.optim import VRSGD
from optimizer_table import MAKE, VR
from tensors import difference

pytestmark = [pytest.mark.filterwarnings("ignore:k = :UserWarning")]

STEPS = 4  # DDP makes its buckets again after the first, with a static graph after the second
SMALL = 0.0005  # MiB of a bucket: several buckets, as large models have
MADE = MAKE | {"VRSGD with beta3": functools.partial(VRSGD, lr=0.1, beta3=0.9)}
every_vr_optimizer = pytest.mark.parametrize("name", VR)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7), nn.LayerNorm(7), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(7, 1)).to(dtype)


def micro_batch(step, rank, number, dtype, samples=6):
    draw = torch.Generator().manual_seed(10000 * step + 100 * rank + number)
    x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
    y = x[:, :1] + x[:, 1:2] * x[:, 2:3] + 0.3 * torch.randn(samples, 1, generator=draw)
    return x.to(dtype), y.to(dtype)


def backward(model, step, rank, number, factor):
    dtype = next(model.parameters()).dtype
    x, y = micro_batch(step, rank, number, dtype)
    (mse_loss(model(x), y) * factor).backward()


def accumulate(ddp, step, rank, accumulation):
    for number in range(accumulation):
        last = number == accumulation - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            backward(ddp, step, rank, number, 1 / accumulation)


def train(ddp, optimizer, rank, accumulation, steps=range(STEPS)):
    for step in steps:
        accumulate(ddp, step, rank, accumulation)
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model, optimizer, ranks, accumulation, steps=range(STEPS)):
    """One process that computes every rank's micro-batches."""
    for step in steps:
        for rank in range(ranks):
            for number in range(accumulation):
                backward(model, step, rank, number, 1 / (ranks * accumulation))
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def alone(name, ranks, accumulation, dtype=torch.float64, steps=STEPS, **own):
    """The weights of one process that computes every rank's micro-batches."""
    model = network(dtype)
    optimizer = MAKE[name](model.parameters(), **own)
    train_alone(model, optimizer, ranks, accumulation, range(steps))
    return weights(model)


def attached(rank, ranks, name, accumulation, dtype=torch.float64, ddp=None, own=None):
    model = DistributedDataParallel(network(dtype), **{"bucket_cap_mb": SMALL} | (ddp or {}))
    optimizer = MAKE[name](model.parameters(), **(own or {}))
    optimizer.attach(model)
    train(model, optimizer, rank, accumulation)
    return weights(model)


def bitwise_equal(results):
    return all(
        torch.equal(local, theirs)
        for other in results[1:]
        for local, theirs in zip(results[0], other, strict=True)
    )


@pytest.mark.early
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("count", [2, 3, 4])
@every_vr_optimizer
def test_ranks_step_as_one_process_does(ranks, name, count, accumulation):
    results = ranks(count)(attached, name, accumulation)
    assert bitwise_equal(results)
    assert difference(alone(name, count, accumulation), results[0]) < 1e-11


# options of DDP, of the optimizer, of attach


OPTIONS = {
    "bucket views": ({"gradient_as_bucket_view": True}, {}),
    "static graph": ({"static_graph": True}, {}),
    "one bucket": ({"bucket_cap_mb": 25}, {}),
    "r_max": ({}, {"r_max": 10.0}),
    "beta3": ({}, {"beta3": 0.5}),
    "watched": ({}, {"watch": True}),
}


@pytest.mark.parametrize("name", ["VRMomentum", "VRAdam"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_change_nothing_that_they_do_not_change_on_one_process(ranks, name, case):
    ddp_options, own = OPTIONS[case]
    accumulation = 1 if case == "static graph" else 2  # torch: its first backward has to reduce
    results = ranks(3)(attached, name, accumulation, torch.float64, ddp_options, own)
    assert bitwise_equal(results)
    assert difference(alone(name, 3, accumulation, **own), results[0]) < 1e-11


@every_vr_optimizer
def test_half_moments_and_single_precision_stay_close(ranks, name):
    """bfloat16 rounds M2 by 2^-9 and r with it; clipped r, and p, less."""
    results = ranks(4)(attached, name, 2, torch.float32)
    assert bitwise_equal(results)
    assert difference(alone(name, 4, 2), results[0]) < 2**-8


def nine_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(9, 9) for _ in range(8)), nn.Linear(9, 1)).double()


def nine_layers_backward(model, step, rank, factor):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 9, generator=draw, dtype=torch.float64)
    ((model(x) - x.sum(1, keepdim=True)).square().mean() * factor).backward()


def sixty_steps(rank, ranks):
    """Nine layers in as many buckets and more."""
    ddp = DistributedDataParallel(nine_layers(), bucket_cap_mb=0.0002)
    optimizer = MAKE["VRAdam"](ddp.parameters())
    optimizer.attach(ddp)
    norms = []
    for step in range(60):
        nine_layers_backward(ddp, step, rank, 1.0)
        norms.append(float(optimizer.attached.grad_norm))
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp), norms


def sixty_steps_alone(ranks):
    model = nine_layers()
    optimizer = MAKE["VRAdam"](model.parameters())
    norms = []
    for step in range(60):
        for rank in range(ranks):
            nine_layers_backward(model, step, rank, 1 / ranks)
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


@pytest.mark.thorough
def test_collectives_of_many_buckets_meet_their_own_on_every_rank(ranks):
    expected, norms = sixty_steps_alone(3)
    results = ranks(3)(sixty_steps)
    assert bitwise_equal([result for result, _ in results])
    assert difference(expected, results[0][0]) < 1e-9
    for _, seen in results:
        assert pytest.approx(norms, rel=1e-9) == seen


def large(rank, ranks):
    """A layer of 20 MB, in one bucket: more than a chunk, and no multiple of the ranks."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(1021, 5003, bias=False), bucket_cap_mb=100)
    optimizer = MAKE["VRMomentum"](ddp.parameters(), beta3=0.9)
    stats = optimizer.attach(ddp)
    large_step(ddp, rank, 1)
    shard = stats._shards[0]
    optimizer.step()
    most = max(chunk.whole.stop - chunk.whole.start for chunk in shard.chunks)
    return weights(ddp), len(shard.chunks), most * 4


def large_step(model, rank, ranks):
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 1021, generator=draw)
    (model(x).square().sum(1).mean() / ranks).backward()


def test_a_bucket_larger_than_a_chunk_is_sent_in_chunks(ranks):
    torch.manual_seed(0)
    model = nn.Linear(1021, 5003, bias=False)
    optimizer = MAKE["VRMomentum"](model.parameters(), beta3=0.9)
    for rank in range(3):
        large_step(model, rank, 3)
    optimizer.step()
    results = ranks(3)(large)
    assert bitwise_equal([result for result, *_ in results])
    # float32: a weight whose three gradients nearly agree has a large share of the layer's mean
    assert difference(weights(model), results[0][0]) < 1e-4
    for _, shards, most in results:
        assert 2 == shards
        assert most <= 16 << 20


# parts of a model


class Parts(nn.Module):
    """`sometimes` is used by rank 0 in every second step, `never` by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(2, 4, 3)
        self.shared, self.sometimes, self.never = (nn.Linear(4, 1) for _ in range(3))
        self.table = nn.Linear(4, 1)
        self.frozen = nn.Linear(4, 1).requires_grad_(False)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x, use):
        y = self.image(x).mean((2, 3))
        y = self.shared(y) + self.table(y) + self.frozen(y)
        return y + self.sometimes(self.image(x).mean((2, 3))) if use else y


def groups_of(model):
    return [
        {"params": [*model.image.parameters(), *model.never.parameters()], "r_max": 5.0},
        {"params": [*model.shared.parameters(), *model.sometimes.parameters()], "beta3": 0.7},
        {"params": [*model.table.parameters()], "vr": False},
    ]


def parts_step(model, step, rank, number, factor):
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    x = torch.randn(5, 2, 6, 6, generator=draw, dtype=torch.float64)
    loss = (model(x, rank == 0 and step % 2 == 0) - x.sum((1, 2, 3))[:, None]).square().mean()
    (loss * factor).backward()


def train_parts(model, optimizer, rank, ranks, reports):
    for step in range(STEPS):
        for number in range(2):
            with contextlib.nullcontext() if number else model.no_sync():
                parts_step(model, step, rank, number, 0.5)
        optimizer.step()
        reports.append(optimizer.gsnr.by_layer())
        optimizer.zero_grad()


def parts(rank, ranks, static):
    model = Parts()
    ddp = DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=SMALL, gradient_as_bucket_view=static
    )
    optimizer = MAKE["VRMomentum"](groups_of(model), watch=True)
    optimizer.attach(ddp)
    reports = []
    train_parts(ddp, optimizer, rank, ranks, reports)
    return weights(model), reports


@pytest.mark.parametrize("views", [False, True])
def test_groups_frozen_unused_and_channels_last_weights_are_those_of_one_process(ranks, views):
    model = Parts()
    optimizer = MAKE["VRMomentum"](groups_of(model), watch=True)
    reports = []
    for step in range(STEPS):
        for rank in range(2):
            for number in range(2):
                parts_step(model, step, rank, number, 0.25)
        optimizer.step()
        reports.append(optimizer.gsnr.by_layer())
        optimizer.zero_grad()
    results = ranks(2)(parts, views)
    assert bitwise_equal([result for result, _ in results])
    assert difference(weights(model), results[0][0]) < 1e-11
    for _, seen in results:
        for local, theirs in zip(reports, seen, strict=True):
            used = {name: row for name, row in theirs.items() if name in local}
            assert used.keys() == local.keys()
            for name, row in local.items():
                assert pytest.approx(row, rel=1e-9, nan_ok=True) == used[name]


# what is around a step


def clipped(rank, ranks, scaled):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE["VRMomentum"](ddp.parameters())
    stats = optimizer.attach(ddp)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    norms = []
    for step in range(STEPS):
        x, y = micro_batch(step, rank, 0, torch.float64)
        scaler.scale(mse_loss(ddp(x), y)).backward()
        scaler.unscale_(optimizer)
        norms.append(float(stats.clip_grad_norm_(0.2, scaler if scaled else None)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(ddp), norms


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_is_by_the_true_norm_and_r_is_that_of_the_unclipped_gradients(ranks, scaled):
    model = network()
    optimizer = MAKE["VRMomentum"](model.parameters())
    norms = []
    for step in range(STEPS):
        for rank in range(3):
            backward(model, step, rank, 0, 1 / 3)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.2
    for result, seen in ranks(3)(clipped, scaled):
        assert pytest.approx(norms, rel=1e-9) == seen
        assert difference(weights(model), result) < 1e-9


def overflowing(rank, ranks, overflows):
    """Four steps, of which the second overflows on rank 1, or is not made at all."""
    ddp = DistributedDataParallel(network(torch.float32), bucket_cap_mb=SMALL)
    optimizer = MAKE["VRAdam"](ddp.parameters())
    stats = optimizer.attach(ddp)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=10**6, backoff_factor=0.5)
    for step in (0, 1, 2, 3) if overflows else (0, 2, 3):
        x, y = micro_batch(step, rank, 0, torch.float32)
        broken = overflows and step == 1 and rank == 1
        scaler.scale(mse_loss(ddp(x), y) * (torch.inf if broken else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    stats.consolidate()
    return weights(ddp), optimizer.state_dict()


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all_and_p_alone(ranks):
    with_one, without = ranks(2)(overflowing, True), ranks(2)(overflowing, False)
    assert bitwise_equal([result for result, _ in with_one])
    for (one, state), (other, expected) in zip(with_one, without, strict=True):
        assert all(map(torch.equal, one, other))
        for local, theirs in zip(state["state"].values(), expected["state"].values(), strict=True):
            assert local.keys() == theirs.keys() >= {"gsnr_average"}
            assert all(torch.equal(local[name], theirs[name]) for name in local)


def measured(rank, ranks, name, per_layer):
    """A meter of the user's own next to the optimizer, plain or attached."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE[name](ddp.parameters())
    if name in VR:
        optimizer.attach(ddp)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # so that the gradients are those of any other optimizer
    read = []
    with GradientMeter(ddp, per_layer=per_layer, half_batch_cosine=True, confidence=0.9) as meter:
        for step in range(STEPS):
            accumulate(ddp, step, rank, 3)
            read.append(meter.read([6] * 3))
            optimizer.step()
            optimizer.zero_grad()
    return read


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_meter_measures_the_true_gradient(ranks, per_layer):
    plain = ranks(3)(still, per_layer)
    for local, theirs in zip(plain, ranks(3)(measured, "VRSGD", per_layer), strict=True):
        for one, other in zip(local, theirs, strict=True):
            for field in ("grad_sqnorm", "grad_variance", "similarity", "half_batch_cosine"):
                assert pytest.approx(getattr(one, field), rel=1e-7) == getattr(other, field)
            assert pytest.approx(one.similarity_interval) == other.similarity_interval
            assert one.layers.keys() == other.layers.keys()
            for name, layer in one.layers.items():
                assert (
                    pytest.approx(layer.grad_variance, rel=1e-7) == other.layers[name].grad_variance
                )
                assert pytest.approx(layer.grad_sqnorm, rel=1e-6) == other.layers[name].grad_sqnorm


def still(rank, ranks, per_layer):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    read = []
    with GradientMeter(ddp, per_layer=per_layer, half_batch_cosine=True, confidence=0.9) as meter:
        for step in range(STEPS):
            accumulate(ddp, step, rank, 3)
            read.append(meter.read([6] * 3))
            ddp.zero_grad()
    return read


# state


def two_legs(rank, ranks, name, state, first, last, attach_first=True):
    """Steps `first` to `last` from a state, and the state after them."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE[name](ddp.parameters())
    if attach_first:
        optimizer.attach(ddp)
    if state is not None:
        ddp.module.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))  # pipes share memory between ranks
    if not attach_first:
        optimizer.attach(ddp)
    train(ddp, optimizer, rank, 2, range(first, last))
    optimizer.attached.consolidate()
    return ddp.module.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("name", ["VRMomentum", "VRAdam", "VRLAMB"])
def test_a_state_continues(ranks, name, attach_first):
    """To the last bit but one: other shards have other elements where torch's vectors end."""
    whole_run = ranks(2)(two_legs, name, None, 0, 7)
    halfway = ranks(2)(two_legs, name, None, 0, 3)
    resumed = ranks(2)(two_legs, name, halfway[0], 3, 7, attach_first)
    for (weights_, state), (others, expected) in zip(resumed, whole_run, strict=True):
        assert difference(others.values(), weights_.values()) < 1e-14
        for local, theirs in zip(state["state"].values(), expected["state"].values(), strict=True):
            assert difference(theirs.values(), local.values()) < 1e-14


@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB"])
def test_a_state_of_one_process_continues_on_ranks_and_back(ranks, name):
    """Two ranks of two micro-batches are one process of four."""
    expected = dict(zip(network().state_dict(), alone(name, 2, 2, steps=6), strict=True))
    model = network()
    optimizer = MAKE[name](model.parameters())
    train_alone(model, optimizer, 2, 2, range(2))
    state = ranks(2)(two_legs, name, (model.state_dict(), optimizer.state_dict()), 2, 4)[1]
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train_alone(model, optimizer, 2, 2, range(4, 6))
    assert difference(expected.values(), model.state_dict().values()) < 1e-11


def forgetful(rank, ranks):
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRAdam"](ddp.parameters())
    stats = optimizer.attach(ddp)
    optimizer.state_dict()  # nothing is spread yet
    for step in range(3):
        accumulate(ddp, step, rank, 1)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:  # alone, as users save
            with pytest.raises(StateError, match="consolidate"):
                optimizer.state_dict()
            with pytest.raises(StateError, match="consolidate"):
                copy.deepcopy(optimizer)
        stats.consolidate()
        if rank == 0:
            optimizer.state_dict()
            assert copy.deepcopy(optimizer).attached is None
    plain = DistributedDataParallel(network())
    without = MAKE["VRSGD"](plain.parameters())
    without.attach(plain)
    accumulate(plain, 0, rank, 1)
    without.step()
    without.state_dict()  # has no p


def test_a_state_that_is_spread_is_refused_until_it_is_brought_together(ranks):
    ranks(2)(forgetful)


# refusals


def refused(rank, ranks, case):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE["VRSGD"](ddp.parameters())
    if case == "not attached":
        with pytest.raises(GradientError, match=r"attach\(ddp_model\)"):
            accumulate(ddp, 0, rank, 1)
        return None
    if case == "construction":
        with pytest.raises(SettingError, match="Sequential"):
            optimizer.attach(ddp.module)
        other = MAKE["VRSGD"]([nn.Parameter(torch.zeros(1))])
        with pytest.raises(SettingError, match="outside the DDP wrapper"):
            other.attach(ddp)
        optimizer.attach(ddp)
        with pytest.raises(SettingError, match="communication hook already"):
            MAKE["VRSGD"](ddp.parameters()).attach(ddp)
        return None
    optimizer.attach(ddp)
    if case == "reduced twice":
        for number in range(3):
            backward(ddp, 0, rank, number, 0.5)
        with pytest.raises(GradientError, match="reduced twice"):
            optimizer.step()
    if case == "never reduced":
        with ddp.no_sync():
            backward(ddp, 0, rank, 0, 1.0)
        with pytest.raises(GradientError, match="no_sync"):
            optimizer.step()
        with pytest.raises(GradientError, match="no_sync"):
            _ = optimizer.attached.grad_norm
    if case == "join":
        with ddp.join():
            backward(ddp, 0, rank, 0, 1.0)
            with pytest.raises(GradientError, match=r"join\(\)"):
                optimizer.step()
        return None
    optimizer.zero_grad()
    for step in range(2):  # and continues
        accumulate(ddp, step, rank, 2)
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


@pytest.mark.parametrize(
    "case", ["not attached", "construction", "reduced twice", "never reduced", "join"]
)
def test_what_would_step_along_something_else_is_refused_on_every_rank(ranks, case):
    results = ranks(3)(refused, case)
    if results[0] is not None:
        assert bitwise_equal(results)
        model = network()
        optimizer = MAKE["VRSGD"](model.parameters())
        for step in range(2):
            for rank in range(3):
                for number in range(2):
                    backward(model, step, rank, number, 1 / 6)
            optimizer.step()
            optimizer.zero_grad()
        assert difference(weights(model), results[0]) < 1e-2


def one_micro_batch(rank, ranks):
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRSGD"](ddp.parameters())
    optimizer.attach(ddp)
    accumulate(ddp, 0, rank, 1)
    with pytest.raises(GradientError, match="1 micro-batches over all ranks"):
        optimizer.step()
    optimizer.zero_grad()
    accumulate(ddp, 0, rank, 2)
    optimizer.step()


def test_one_rank_needs_two_micro_batches(ranks):
    ranks(1)(one_micro_batch)


def alike(rank, ranks):
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRSGD"](ddp.parameters())
    optimizer.attach(ddp)
    accumulate(ddp, 0, 0, 1)  # rank 0's data on every rank
    with warnings.catch_warnings(record=True, action="always") as caught:
        optimizer.step()
    return [str(w.message) for w in caught]


def test_the_same_data_on_all_ranks_are_named(ranks):
    for said in ranks(2)(alike):
        assert any("same gradient" in each for each in said)
        assert any("k = 2" in each for each in said)


def let_go(rank, ranks):
    """Neither the hook nor the attachment keeps an optimizer alive; the next one is warned."""
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRAdam"](ddp.parameters())
    optimizer.attach(ddp)
    accumulate(ddp, 0, rank, 1)
    optimizer.step()
    optimizer.zero_grad()
    watched = weakref.ref(optimizer)
    stats = optimizer.attached
    del optimizer
    gc.collect()
    assert watched() is None
    accumulate(ddp, 0, rank, 1)
    with pytest.raises(GradientError, match="is gone"):
        _ = stats.grad_norm


def test_an_optimizer_that_nobody_holds_is_gone(ranks):
    ranks(2)(let_go)


def over_some(rank, ranks):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    ddp = DistributedDataParallel(network(), process_group=group)
    optimizer = MAKE["VRAdam"](ddp.parameters())
    optimizer.attach(ddp)
    for step in range(STEPS):
        accumulate(ddp, step, rank - 1, 2)
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def test_a_group_of_some_ranks_is_those_ranks(ranks):
    _, *results = ranks(3)(over_some)
    assert bitwise_equal(results)
    assert difference(alone("VRAdam", 2, 2), results[0]) < 1e-11


# what else users do


def mean_gradients(ranks, numbers=(0,)):
    model = network()
    for rank in range(ranks):
        for number in numbers:
            backward(model, 0, rank, number, 1 / ranks)
    return [p.grad for p in model.parameters()]


def without_its_optimizer(rank, ranks, case):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    if case == "gone":
        MAKE["VRSGD"](ddp.parameters()).attach(ddp)
        gc.collect()
    else:
        optimizer = MAKE["VRSGD"]([{"params": ddp.parameters(), "vr": False}])
        optimizer.attach(ddp)
    accumulate(ddp, 0, rank, 1)
    gradients = [p.grad.clone() for p in ddp.parameters()]
    if case == "no group with vr":
        optimizer.step()
    return gradients


@pytest.mark.parametrize("case", ["gone", "no group with vr"])
def test_where_nothing_is_scaled_the_gradient_is_the_mean(ranks, case):
    for gradients in ranks(3)(without_its_optimizer, case):
        assert difference(mean_gradients(3), gradients) < 1e-12


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.somewhere = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()

    def forward(self, x, both):
        y = self.shared(x).square().mean()
        return y + self.somewhere(x).square().mean() if both else y


def parts_of(model):
    return [
        {"params": model.somewhere.parameters()},
        {"params": model.shared.parameters(), "vr": False},
    ]


def reached_by_one_rank(rank, ranks):
    model = TwoParts()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = MAKE["VRSGD"](parts_of(model))
    stats = optimizer.attach(ddp)
    for number in range(2):
        x, _ = micro_batch(0, rank, number, torch.float64)
        with contextlib.nullcontext() if number else ddp.no_sync():
            (ddp(x, rank == 0) / 2).backward()
    shared = [p.grad.clone() for p in model.shared.parameters()]
    optimizer.step()
    return shared, float(stats.grad_norm)


def test_weights_without_vr_have_the_mean_of_ranks_that_reach_no_other(ranks):
    model = TwoParts()
    for rank in range(2):
        for number in range(2):
            x, _ = micro_batch(0, rank, number, torch.float64)
            (model(x, rank == 0) / 4).backward()
    expected = [p.grad for p in model.shared.parameters()]
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for gradients, seen in ranks(2)(reached_by_one_rank):
        assert difference(expected, gradients) < 1e-12
        assert pytest.approx(float(norm)) == seen


def norm_of_a_part(rank, ranks):
    model = TwoParts()
    ddp = DistributedDataParallel(model)
    optimizer = MAKE["VRSGD"](model.shared.parameters())
    stats = optimizer.attach(ddp)
    x, _ = micro_batch(0, rank, 0, torch.float64)
    ddp(x, True).backward()
    rest = torch.cat([p.grad.flatten() for p in model.somewhere.parameters()])
    return float(stats.grad_norm), float(rest.norm())


def test_the_norm_is_that_of_what_the_optimizer_trains(ranks):
    model = TwoParts()
    for rank in range(2):
        (model(micro_batch(0, rank, 0, torch.float64)[0], True) / 2).backward()
    norms = [
        float(torch.cat([p.grad.flatten() for p in part.parameters()]).norm())
        for part in (model.shared, model.somewhere)
    ]
    for seen in ranks(2)(norm_of_a_part):
        assert pytest.approx(norms) == list(seen)


def wrapped_again(rank, ranks):
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = MAKE["VRAdam"](model.parameters())
    optimizer.attach(ddp)
    for step in range(STEPS):
        if step == 2:
            ddp = DistributedDataParallel(model)
            optimizer.attach(ddp)
        accumulate(ddp, step, rank, 2)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_p_goes_along_when_a_model_is_wrapped_again(ranks):
    results = ranks(2)(wrapped_again)
    assert bitwise_equal(results)
    assert difference(alone("VRAdam", 2, 2), results[0]) < 1e-11


def not_reduced(rank, ranks, case):
    model = network()
    model[0].bias.requires_grad_(case != "unfrozen")
    ddp = DistributedDataParallel(model)
    optimizer = MAKE["VRSGD"](model.parameters())
    optimizer.attach(ddp)
    other = nn.Parameter(torch.ones(1, dtype=torch.float64))
    if case == "unfrozen":
        model[0].bias.requires_grad_()
    if case == "added":
        optimizer.add_param_group({"params": [other]})
    if case == "hook":
        model[0].weight.register_hook(lambda gradient: 3 * gradient)
    for number in range(2):
        x, y = micro_batch(0, rank, number, torch.float64)
        with contextlib.nullcontext() if number else ddp.no_sync():
            (mse_loss(ddp(x) * other, y) / 2).backward()
    with pytest.raises(
        GradientError, match="register it before" if case == "hook" else "not reduce"
    ):
        optimizer.step()


@pytest.mark.parametrize("case", ["unfrozen", "added", "hook"])
def test_gradients_that_ddp_does_not_reduce_or_a_hook_changes_are_refused(ranks, case):
    ranks(2)(not_reduced, case)


def hooked_before(rank, ranks):
    model = network()
    model[0].weight.register_hook(lambda gradient: 3 * gradient)
    ddp = DistributedDataParallel(model)
    optimizer = MAKE["VRMomentum"](model.parameters())
    optimizer.attach(ddp)
    train(ddp, optimizer, rank, 2)
    return weights(model)


def test_a_hook_that_was_there_before_is_part_of_the_gradient(ranks):
    model = network()
    model[0].weight.register_hook(lambda gradient: 3 * gradient)
    optimizer = MAKE["VRMomentum"](model.parameters())
    train_alone(model, optimizer, 2, 2)
    assert difference(weights(model), ranks(2)(hooked_before)[0]) < 1e-11


def twice(rank, ranks):
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRAdam"](ddp.parameters())
    stats = optimizer.attach(ddp)
    accumulate(ddp, 0, rank, 1)
    norm = float(stats.clip_grad_norm_(0.1))
    scaled = [p.grad.clone() for p in ddp.parameters()]
    assert pytest.approx(0.1, rel=1e-4) == float(stats.clip_grad_norm_(0.1))
    assert difference(scaled, [p.grad for p in ddp.parameters()]) < 1e-4
    optimizer.step()
    with pytest.raises(GradientError, match="twice"):
        optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # as a checkpoint of torch's does
    with pytest.raises(StateError, match="consolidate"):
        optimizer.state_dict()
    return norm


def test_clipping_twice_clips_once_and_stepping_twice_is_refused(ranks):
    ranks(2)(twice)


def copied(rank, ranks):
    ddp = DistributedDataParallel(network())
    optimizer = MAKE["VRSGD"](ddp.parameters())
    optimizer.attach(ddp)
    accumulate(ddp, 0, rank, 1)
    optimizer.step()
    return weights(copy.deepcopy(ddp)), weights(ddp)


def test_an_attached_model_can_be_copied(ranks):
    for local, theirs in ranks(2)(copied):
        assert all(map(torch.equal, local, theirs))


def flattened(rank, ranks, name):
    """Weights of 4 steps; of 2 and 2 more from a flattened checkpoint, into used and new ones."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def made():
        ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
        optimizer = MADE[name](ddp.parameters())
        optimizer.attach(ddp)
        return ddp, optimizer

    used, used_optimizer = made()
    train(used, used_optimizer, rank, 2, range(2))
    used_optimizer.attached.consolidate()
    state = get_optimizer_state_dict(used, used_optimizer, options=options)
    saved = copy.deepcopy((used.module.state_dict(), state))
    train(used, used_optimizer, rank, 2, range(2, 4))
    ends = [weights(used)]
    for ddp, optimizer in ((used, used_optimizer), made()):  # p of the used is spread
        ddp.module.load_state_dict(saved[0])
        set_optimizer_state_dict(ddp, optimizer, copy.deepcopy(saved[1]), options=options)
        train(ddp, optimizer, rank, 2, range(2, 4))
        ends.append(weights(ddp))
    return ends


@pytest.mark.parametrize("name", ["VRAdam", "VRSGD with beta3"])
def test_a_flattened_checkpoint_continues(ranks, name):
    """To the last bit; in a new model, whose first buckets are others, to the last but one."""
    for whole_run, used, new in ranks(2)(flattened, name):
        assert all(map(torch.equal, whole_run, used))
        assert difference(whole_run, new) < 1e-14


def loaded_back(rank, ranks):
    """Two steps, a state, two more, back to the state, and the same two again."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE["VRAdam"](ddp.parameters())
    optimizer.attach(ddp)
    ends = []
    for step in (0, 1, 2, 3, 2, 3):
        if step == 2 and not ends:
            optimizer.attached.consolidate()
            state = copy.deepcopy((ddp.module.state_dict(), optimizer.state_dict()))
        elif step == 2:
            ddp.module.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        accumulate(ddp, step, rank, 2)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            ends.append(weights(ddp))
        elif step == 2:
            ends = ends or [None]
    return ends[1:]


def test_a_state_that_is_loaded_back_is_gone_on_with(ranks):
    for first, again in ranks(2)(loaded_back):
        assert all(map(torch.equal, first, again))


UNEQUAL = [1, 2, 3, 1]


def unequal(rank, ranks):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = MAKE["VRAdam"](ddp.parameters())
    optimizer.attach(ddp)
    for step in range(STEPS):
        for number in range(UNEQUAL[rank]):
            last = number == UNEQUAL[rank] - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                backward(ddp, step, rank, number, 4 / sum(UNEQUAL))
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def test_ranks_count_by_their_micro_batches(ranks):
    model = network()
    optimizer = MAKE["VRAdam"](model.parameters())
    for step in range(STEPS):
        for rank, micro_batches in enumerate(UNEQUAL):
            for number in range(micro_batches):
                backward(model, step, rank, number, 1 / sum(UNEQUAL))
        optimizer.step()
        optimizer.zero_grad()
    results = ranks(4)(unequal)
    assert bitwise_equal(results)
    assert difference(weights(model), results[0]) < 1e-11
