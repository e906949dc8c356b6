"""Variance-reduced optimizers under DDP: the step of one process, at the bytes of an all-reduce."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from test_ranks_optimizers import MAKE, VR, difference

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.filterwarnings("ignore:k = :UserWarning"),
]

STEPS = 4  # DDP makes its buckets anew after the first, with a static graph after the second
SMALL = 0.0005  # MiB of a bucket: several buckets, as large models have
EXACT = {"m2_dtype": torch.float64}
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


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def alone(name, ranks, accumulation, dtype=torch.float64, steps=STEPS, **own):
    """The weights of one process that computes every rank's micro-batches."""
    model = network(dtype)
    optimizer = MAKE[name](model.parameters(), **own)
    for step in range(steps):
        for rank in range(ranks):
            for number in range(accumulation):
                backward(model, step, rank, number, 1 / (ranks * accumulation))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def attached(
    rank, ranks, name, accumulation, options, ddp_options, dtype=torch.float64, own=None, nodes=None
):
    ddp = DistributedDataParallel(network(dtype), **{"bucket_cap_mb": SMALL} | ddp_options)
    optimizer = MAKE[name](ddp.parameters(), **(own or {}))
    if nodes:
        groups = [dist.new_group(node) for node in nodes]
        options = options | {"node_group": groups[[rank in node for node in nodes].index(True)]}
    optimizer.attach(ddp, **options)
    for step in range(STEPS):
        accumulate(ddp, step, rank, accumulation)
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


def bitwise_equal(results):
    return all(
        torch.equal(mine, theirs)
        for other in results[1:]
        for mine, theirs in zip(results[0], other, strict=True)
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("count", [2, 3, 4])
@every_vr_optimizer
def test_ranks_step_as_one_process_does(ranks, name, count, accumulation):
    results = ranks(count)(attached, name, accumulation, EXACT, {})
    assert bitwise_equal(results)
    assert difference(alone(name, count, accumulation), results[0]) < 1e-11
