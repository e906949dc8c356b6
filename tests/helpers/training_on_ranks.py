"""What tests on ranks train: data, networks, engines, a loop; and its float64 answer in one."""

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

STEPS = 3
REL = 1e-5  # float32 gradients (1e-7 each) of weights that moved in float32 for some steps

EQUAL = [[4, 6, 2], [4, 6, 2], [4, 6, 2], [4, 6, 2]]
SAME_TOTAL = [[4, 6, 2], [3, 3, 6], [1, 10, 1], [5, 5, 2]]  # so "weighted" is a mean over samples
SAME_COUNT = [[4, 6, 2], [3, 3, 3], [8, 1, 4], [2, 2, 9]]
RAGGED = [[4, 6], [3, 3, 3], [8], [2, 5, 1, 7]]
RAGGED_SAME_TOTAL = [[4, 6], [3, 3, 4], [10], [2, 5, 1, 2]]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rank, step, number, n):
    """Micro-batch `number` of one rank."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(n, 5, generator=draw), torch.randint(3, (n,), generator=draw)


def batches(step, sizes):
    """Of every rank, with their sizes, those of rank 0 first."""
    return [
        batch(rank, step, number, n)
        for rank, local in enumerate(sizes)
        for number, n in enumerate(local)
    ]


# engines


def ddp(**options):
    return lambda model, ranks: DistributedDataParallel(model, **options)


def sharded(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(**options):
    return lambda model, ranks: sharded(model, **options)


def two_rows(ranks):
    """The mesh of HSDP: two copies of the model, each over half of the ranks."""
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))


def hsdp(**options):
    return lambda model, ranks: sharded(model, mesh=two_rows(ranks), **options)


ENGINES = {"ddp": ddp(), "fsdp2": fsdp2(), "hsdp": hsdp()}


@contextlib.contextmanager
def synchronized(model, now):
    """As users accumulate: the gradient is reduced in the last backward only."""
    if hasattr(model, "no_sync"):
        with contextlib.nullcontext() if now else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(now)
        yield


# a loop


def share(loss, n, local, sizes):
    """What a micro-batch's mean loss is multiplied by."""
    totals = {"weighted": sum(local), "summed": sum(map(sum, sizes)), "mean": n}
    return n / totals[loss]


def accumulate(model, rank, step, sizes, loss="weighted", *, always_sync=False):
    """The backwards of one step on this rank."""
    local = sizes[rank]
    for number, n in enumerate(local):
        with synchronized(model, always_sync or number == len(local) - 1):
            x, y = batch(rank, step, number, n)
            (cross_entropy(model(x), y) * share(loss, n, local, sizes)).backward()


def train(rank, ranks, model, sizes, loss="weighted", *, steps=STEPS, always_sync=False, **options):
    """What the meter reads on this rank over some steps, the weights moving between.

    "summed" is a "weighted" loss whose weights are n_d / N with N of all ranks.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings = []
    stated = "mean" if loss == "mean" else "weighted"
    with GradientMeter(model, loss=stated, **options) as meter:
        for step in range(steps):
            accumulate(model, rank, step, sizes, loss, always_sync=always_sync)
            readings.append(meter.read(sizes[rank]))
            optimizer.step()
            optimizer.zero_grad()
    return readings


# the same on one process


def in_float64(model, x, y, factor):
    """The mean gradient of a micro-batch, exactly."""
    return _gradient(copy.deepcopy(model).double(), x.double(), y, 1.0)


def in_own_precision(model, x, y, factor):
    """As it comes out of low precision, whose rounding is part of what is measured."""
    return _gradient(model, x, y, factor)


def in_bfloat16(model, x, y, factor):
    """As under a mixed precision policy: float32 weights, everything else in bfloat16."""
    return _gradient(copy.deepcopy(model).bfloat16(), x.bfloat16(), y, factor)


def _gradient(model, x, y, factor):
    watched = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(
        cross_entropy(model(x), y) * factor, watched, materialize_grads=True
    )
    return torch.cat([part.flatten().double() for part in parts]) / factor


def gradients(model, step, sizes, loss="weighted", of_one=in_float64):
    """The mean gradient of every micro-batch of every rank."""
    factors = [share(loss, n, local, sizes) for local in sizes for n in local]
    drawn = batches(step, sizes)
    return torch.stack([of_one(model, x, y, f) for (x, y), f in zip(drawn, factors, strict=True)])


def expected(build, sizes, loss="weighted", *, steps=STEPS, of_one=in_float64, columns=slice(None)):
    """The oracle's answers over the steps of `train`; `columns` are those of one layer."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers = []
    for step in range(steps):
        g = gradients(model, step, sizes, loss, of_one)
        answers.append(_answer(g[:, columns], sizes, loss))
        factors = torch.tensor([share(loss, n, local, sizes) for local in sizes for n in local])
        joined = factors.double() @ g / (1 if loss == "summed" else len(sizes))
        _set_gradients(model, joined)
        optimizer.step()
    return answers


def one_step(build, step, sizes, loss="weighted", *, of_one=in_float64):
    """The oracle's answer for one step at the first weights."""
    return _answer(gradients(build(), step, sizes, loss, of_one), sizes, loss)


def _answer(g, sizes, loss):
    formula = oracle.mean if loss == "mean" else oracle.weighted
    return formula(g, [n for local in sizes for n in local])


def _set_gradients(model, flat):
    watched = [p for p in model.parameters() if p.requires_grad]
    chunks = flat.split([p.numel() for p in watched])
    for p, chunk in zip(watched, chunks, strict=True):
        p.grad = chunk.view_as(p).float()


def close(answer, reading, rel=REL):
    """Whether a reading is the oracle's, as far as float32 can tell.

    The signal is |G|^2 less noise / N, and may be any small number: it is as exact as those. Mean
    losses of unequal sizes may put it below what |G|^2 >= 0 allows, where similarity is -1.
    """
    per_batch = answer.grad_variance / reading.samples
    apart = abs(answer.grad_sqnorm) + per_batch
    similarity = -1.0 if answer.grad_sqnorm < -per_batch else answer.similarity
    return (
        pytest.approx(answer.grad_variance, rel=rel) == reading.grad_variance
        and pytest.approx(answer.grad_sqnorm, abs=rel * apart) == reading.grad_sqnorm
        and pytest.approx(similarity, abs=rel) == reading.similarity
    )


def all_close(answers, results, rel=REL):
    """Whether every rank read the oracle's numbers at every step."""
    return all(
        close(answer, reading, rel)
        for readings in results
        for answer, reading in zip(answers, readings, strict=True)
    )
