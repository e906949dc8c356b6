"""What AdaptiveBatch leaves for the optimizer is the mean over the batch, on any engine."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import bigbatch as bb
from numbered_samples import whole
from training_on_ranks import two_rows

SAMPLES = 47  # no multiple of any number of ranks, and shared unevenly by the last steps


class Pairs(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
        self.y = self.x[:, :1] + 0.5 * torch.randn(SAMPLES, 1, generator=draw)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return self.x[number], self.y[number], number


class Routed(nn.Module):
    """`odd` is used where a micro-batch has an odd number of samples, `unused` by nobody."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh())
        self.head, self.odd, self.unused = (nn.Linear(9, 1) for _ in range(3))

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden) + self.odd(hidden) * (len(x) % 2)


class Straight(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def ddp(model, ranks, precision, **options):
    return DistributedDataParallel(model, bucket_cap_mb=0.0002, **options)


def sharded(model, ranks, precision, hybrid=False):
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    policy = {"mp_policy": MixedPrecisionPolicy(half, torch.float32)} if half else {}
    mesh = two_rows(ranks) if hybrid else None
    fully_shard(model[0], mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


# model, wrapper, ranks
ENGINES = {
    "one process": (Straight, lambda model, ranks, precision: model, [1]),
    "DDP": (Straight, ddp, [1, 2, 3, 4]),
    "DDP, bucket views": (Straight, partial(ddp, gradient_as_bucket_view=True), [3]),
    "DDP, static graph": (Straight, partial(ddp, static_graph=True), [2, 3]),
    "DDP, unused": (Routed, partial(ddp, find_unused_parameters=True), [2, 3]),
    "FSDP2": (Straight, sharded, [1, 2, 3, 4]),
    "HSDP": (Straight, partial(sharded, hybrid=True), [4]),
}
# half types have 8 and 11 bits, and sums cancel some; one sample left out would be 1 / 16
PRECISIONS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 5e-2, "fp16": 8e-3}


def gradients(rank, ranks, engine, precision):
    """Of every step of an epoch: the samples' numbers, and the gradient that was stepped along."""
    make, wrap, _ = ENGINES[engine]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = wrap(make().to(dtype), ranks, precision)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = half is not None and "SDP" not in engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = Pairs()
    sampler = bb.ElasticDistributedSampler(data, num_replicas=ranks, rank=rank)
    scaler = GradScaler("cpu", init_scale=256.0) if precision == "fp16" else None
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        DataLoader(data, 5, sampler=sampler),
        policy=bb.Fixed(16),
        micro_batch=3,
        lr_scaling=None,
        scaler=scaler,
        every=1,
    )
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        )
    )
    read = []
    for step in train:
        numbers = []
        for x, y, number in step:
            with torch.autocast("cpu", half or torch.bfloat16, enabled=autocast):
                out = model(x.to(dtype))
            step.backward(mse_loss(out.to(dtype), y.to(dtype)))
            numbers.append(number.tolist())
        step.update()
        read.append(numbers)
    return read, seen


def expected(make, step):
    """In float64, over all ranks' micro-batches as they were cut."""
    model, data = make().double(), Pairs()
    cut = [chunk for rank in step for chunk in rank]
    total = sum(map(len, cut))
    for chunk in cut:
        (mse_loss(model(data.x[chunk]), data.y[chunk]) * len(chunk) / total).backward()
    return total, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("engine", "count"), [(engine, n) for engine, (*_, counts) in ENGINES.items() for n in counts]
)
def test_the_optimizer_steps_along_the_mean_over_the_batch(ranks, engine, count, precision):
    make, close = ENGINES[engine][0], PRECISIONS[precision]
    if engine == "one process":
        answers = [gradients(0, 1, engine, precision)]
    else:
        answers = ranks(count)(gradients, engine, precision)
    steps = list(zip(*(read for read, _ in answers), strict=True))
    assert len({sum(len(chunk) for rank in step for chunk in rank) for step in steps}) > 1
    assert SAMPLES == sum(len(chunk) for step in steps for rank in step for chunk in rank)
    for number, step in enumerate(steps):
        _, whole_gradient = expected(make, step)
        for _, seen in answers:
            for local, theirs in zip(whole_gradient, seen[number], strict=True):
                if local is None:
                    assert theirs is None or not theirs.any()
                else:
                    error = (local - theirs.double()).abs().max() / local.abs().max()
                    assert error < close
