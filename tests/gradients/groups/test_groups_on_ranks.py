"""GradientMeter(groups=k) on ranks: k = ranks x groups, and the answer of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bigbatch import GradientMeter
from bigbatch.errors import GradientError
from group_gradients import sizes_of
from oracles import noise as oracle
from training_on_ranks import batch, network

torch.set_num_threads(1)
K, N = 4, 7  # groups and samples of a backward


class Attentive(nn.Module):
    """Embeds numbers, attends, normalizes; its head is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(1, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        hidden = self.block(self.embed(x.unsqueeze(-1)))
        return self.head(torch.tanh(self.head(hidden.mean(1))) * self.scale)[:, :3]


MODELS = {"linear": network, "attentive": Attentive}


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def sharded(model):
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


ENGINES = {
    "ddp": ddp(),
    "ddp-static": ddp(static_graph=True),
    "ddp-unused": ddp(find_unused_parameters=True),
    "ddp-views": ddp(gradient_as_bucket_view=True),
    "fsdp2": sharded,
}


def readings(rank, ranks, engine, kind, backwards, options, steps=3):
    """What every rank reads, and the gradients of the last step."""
    model = MODELS[kind]().double()
    wrapped = ENGINES[engine](model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    read = []
    with GradientMeter(wrapped, groups=K, **options) as meter:
        for step in range(steps):
            optimizer.zero_grad()
            for number in range(backwards):
                x, y = batch(rank, step, number, N)
                (cross_entropy(wrapped(x.double()), y) / backwards).backward()
            read.append(meter.read(samples=[N] * backwards))
            optimizer.step()
    return [(s.grad_sqnorm, s.grad_variance, s.micro_batches, s.samples) for s in read]


def expected(ranks, kind, backwards, steps=3):
    """The same from a loop of backwards over every group of every rank."""
    model = MODELS[kind]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers = []
    for step in range(steps):
        rows, sizes = [], []
        for rank in range(ranks):
            for number in range(backwards):
                x, y = batch(rank, step, number, N)
                own = sizes_of(N, K)
                for part, labels in zip(x.double().split(own), y.split(own), strict=True):
                    loss = cross_entropy(model(part), labels)
                    grads = torch.autograd.grad(loss, list(model.parameters()))
                    rows.append(torch.cat([g.flatten() for g in grads]))
                sizes += own
        answer = oracle.weighted(torch.stack(rows), sizes)
        answers.append((answer.grad_sqnorm, answer.grad_variance, len(sizes), sum(sizes)))
        mean = (torch.stack(rows) * torch.tensor(sizes).double()[:, None]).sum(0) / sum(sizes)
        parts = mean.split([p.numel() for p in model.parameters()])
        for p, g in zip(model.parameters(), parts, strict=True):
            p.grad = g.view_as(p).clone()
        optimizer.step()
    return answers


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(
    ("engine", "count"),
    [("ddp", 2), ("ddp", 4), ("ddp-static", 2), ("ddp-unused", 2), ("ddp-views", 2), ("fsdp2", 2)],
)
def test_groups_of_all_ranks_are_those_of_one_process(ranks, engine, count, backwards, kind):
    local = expected(count, kind, backwards)
    for actual in ranks(count)(readings, engine, kind, backwards, {"per_layer": True}):
        for step, answer in zip(local, actual, strict=True):
            assert pytest.approx(step, rel=1e-8) == answer


def projections(rank, ranks, engine, steps):
    return readings(rank, ranks, engine, "linear", 1, {}, steps)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_share_the_random_signs(ranks, engine):
    """Every rank reads the same, and the exact length of the mean gradient."""
    local = expected(2, "linear", 1)
    first, second = ranks(2)(projections, engine, 3)
    assert first == second
    for (signal, noise, *_), (own_signal, own_noise, _, n) in zip(local, first, strict=True):
        assert pytest.approx(signal + noise / n, rel=1e-8) == own_signal + own_noise / n


def unseen_on_one_rank(rank, ranks):
    model = network().double()
    wrapped = DistributedDataParallel(model)
    with GradientMeter(wrapped, groups=K) as meter:
        x, y = batch(rank, 0, 0, N)
        loss = cross_entropy(wrapped(x.double()), y)
        if rank == 1:
            loss = loss + model[0].weight.square().sum()
        loss.backward()
        try:
            meter.read(samples=[N])
        except GradientError as error:
            return str(error)
    return ""


def test_every_rank_says_that_one_did_not_see_all(ranks):
    assert all("do not add up" in message for message in ranks(2)(unseen_on_one_rank))


class TwoLosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, y):
        output = self.network(x)
        return cross_entropy(output, y), output.square().mean()


def of_two_losses(rank, ranks, engine):
    model = ENGINES[engine](TwoLosses().double())
    x, y = batch(rank, 0, 0, N)
    with GradientMeter(model, groups=K) as meter:
        sum(model(x.double(), y)).backward()
        return meter.read(samples=[N]).grad_variance


def test_two_losses_that_a_model_returns_are_no_product_in_ddps_function_of_all_outputs(ranks):
    plain, through_it = (ranks(2)(of_two_losses, engine) for engine in ("ddp", "ddp-unused"))
    assert pytest.approx(plain, rel=1e-12) == through_it
