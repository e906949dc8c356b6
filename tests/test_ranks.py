"""GradientMeter on real processes: DDP, FSDP2 and HSDP against one process in float64."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bigbatch import GradientMeter
from oracles import noise as oracle

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 3
REL = 2e-4  # float32 gradients; signal and similarity are differences


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rank, step, number, n):
    """Micro-batch `number` of one rank."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(n, 5, generator=draw), torch.randint(3, (n,), generator=draw)


def sharded(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def hybrid(model, ranks):
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
    return sharded(model, mesh=mesh)


WRAPPERS = {
    "ddp": lambda model, ranks: DistributedDataParallel(model),
    "ddp-views": lambda model, ranks: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "ddp-static": lambda model, ranks: DistributedDataParallel(model, static_graph=True),
    "ddp-unused": lambda model, ranks: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp-small-buckets": lambda model, ranks: DistributedDataParallel(
        model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True
    ),
    "fsdp2": lambda model, ranks: sharded(model),
    "fsdp2-kept": lambda model, ranks: sharded(model, reshard_after_forward=False),
    "hsdp": hybrid,
}


@contextlib.contextmanager
def synchronized(model, now):
    """As users accumulate: the gradient is reduced in the last backward only."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if now else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(now)
        yield


def train(rank, ranks, wrapper, loss, sizes, always_sync, options):
    """What the meter reads on this rank over some steps, the weights moving between."""
    model = WRAPPERS[wrapper](network(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = sizes[rank]
    readings = []
    with GradientMeter(model, loss=loss, **options) as meter:
        for step in range(STEPS):
            for number, n in enumerate(mine):
                # torch itself asserts where the first backward of a static graph does not reduce
                first = wrapper == "ddp-static" and not step and not number
                with synchronized(model, always_sync or first or number == len(mine) - 1):
                    x, y = batch(rank, step, number, n)
                    share = n / sum(mine) if loss == "weighted" else 1.0
                    (cross_entropy(model(x), y) * share).backward()
            readings.append(meter.read(mine))
            optimizer.step()
            optimizer.zero_grad()
    return readings


def expected(loss, sizes, ranks):
    """The same on one process, from float64 gradients of every micro-batch of every rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers = []
    for step in range(STEPS):
        exact = copy.deepcopy(model).double()
        gradients, flat = [], []
        for rank in range(ranks):
            for number, n in enumerate(sizes[rank]):
                x, y = batch(rank, step, number, n)
                value = cross_entropy(exact(x.double()), y)
                parts = torch.autograd.grad(value, list(exact.parameters()))
                gradients.append(torch.cat([part.flatten() for part in parts]))
                flat.append(n)
        answers.append((getattr(oracle, loss)(torch.stack(gradients), flat), gradients, flat))
        shares = [
            n / sum(sizes[rank]) if loss == "weighted" else 1.0
            for rank in range(ranks)
            for n in sizes[rank]
        ]
        mean = sum(s * g for s, g in zip(shares, gradients, strict=True)) / ranks
        at = 0
        for p in model.parameters():
            p.grad = mean[at : at + p.numel()].view_as(p).float()
            at += p.numel()
        optimizer.step()
    return answers


def close(answer, reading):
    seen = (reading.signal, reading.noise, reading.similarity, reading.noise_scale)
    return pytest.approx(tuple(answer), rel=REL, abs=1e-6) == seen


@pytest.mark.parametrize("always_sync", [False, True], ids=["no_sync", "sync"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_engine_measures_what_one_process_would(ranks, wrapper, count, always_sync):
    if wrapper == "hsdp" and count % 2:
        pytest.skip("a mesh of two rows needs an even number of ranks")
    sizes = [[4, 6, 2]] * count
    results = ranks(count)(train, wrapper, "weighted", sizes, always_sync, {})
    for step, (answer, _, _) in enumerate(expected("weighted", sizes, count)):
        for readings in results:
            assert close(answer, readings[step])
            assert (3 * count, 12 * count) == (readings[step].micro_batches, readings[step].samples)
