"""AdaptiveBatch on any engine over samples that carry their number: which rank read which."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import bigbatch as bb
from bigbatch.gradients import SingleProcessSource
from single_steps import by_single_steps
from training_on_ranks import two_rows

SAMPLES = 1003  # no multiple of anything

SEED = 3


class Numbered(Dataset):
    """Samples that carry their number."""

    def __init__(self, samples=SAMPLES):
        draw = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
        noise = torch.randn(samples, generator=draw, dtype=torch.float64)
        self.y = (self.x[:, 0] + noise > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], self.y[number], number


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def wrapped(engine, ranks):
    model = network()
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "ddp-static":
        return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    if engine in ("fsdp2", "hsdp"):
        mesh = two_rows(ranks) if engine == "hsdp" else None
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def ledger_loader(rank, ranks, samples=SAMPLES, size=16):
    data = Numbered(samples)
    sampler = bb.ElasticDistributedSampler(data, seed=SEED, num_replicas=ranks, rank=rank)
    return DataLoader(data, size, sampler=sampler)


def controller_of():
    """That of `build`: SimiGrad by single steps."""
    policy = bb.SimiGrad(target=0.3, min_batch=32, max_batch=300)
    return bb.Controller(policy, 64, smoothing=None)


def build(rank, ranks, engine, virtual_ranks, loader=None, **settings):
    model = wrapped(engine, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ledger_loader(rank, ranks) if loader is None else loader
    settings = {
        "policy": bb.SimiGrad(target=0.3, min_batch=32, max_batch=300),
        "batch_size": 64,
        "micro_batch": 12,
    } | settings
    batches = (
        loader
        if isinstance(loader, bb.Batches)
        else bb.Batches(loader, virtual_ranks=virtual_ranks)
    )
    settings = by_single_steps({"every": 1, **settings})
    return bb.AdaptiveBatch(model, optimizer, batches, **settings)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def each_step(train, clip=None):
    """(numbers of the samples, record) of each step of a pass on this rank."""
    for step in train:
        numbers = []
        for x, y, number in step:
            step.backward(cross_entropy(train.model(x), y))
            numbers.append(number.tolist())
        if clip is not None:
            step.clip_grad_norm_(clip)
        yield numbers, step.update()


def steps_of(train, epochs, most=10**9, clip=None):
    """The same of several passes, or of the first `most` steps."""
    done = []
    for _ in train.epochs(epochs):
        for each in each_step(train, clip):
            done.append(each)
            if len(done) == most:
                return done
    return done


def trained_by_groups(make, steps):
    """Weights of one process in float64 whose variance-reduced optimizer compares these groups."""
    model, data = network(), Numbered()
    optimizer = make(model)
    source = SingleProcessSource(model.parameters(), explicit=True)
    optimizer.bind(source)
    for groups in steps:
        for group in groups:
            with source.micro_batch(len(group)):
                loss = cross_entropy(model(data.x[group]), data.y[group])
                (loss * len(group) / sum(map(len, groups))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def run(rank, ranks, engine, virtual_ranks, updates):
    train = build(rank, ranks, engine, virtual_ranks)
    done = steps_of(train, 10**9, updates)
    weights = [whole(p) for p in train.model.parameters()]
    return [numbers for numbers, _ in done], [record for _, record in done], weights


def together(answers):
    """Every step's samples, whoever read them."""
    return [
        sorted(n for numbers in step for chunk in numbers for n in chunk)
        for step in zip(*(answer[0] for answer in answers), strict=True)
    ]


class Shard(IterableDataset):
    """A part of a stream that nobody knows the length of."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.samples)
        for number in range(self.samples):
            x = torch.randn(5, generator=draw, dtype=torch.float64)
            yield x, torch.tensor(number % 3), number
