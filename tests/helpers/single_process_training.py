"""What tests in one process train: data, a network, a step; and its float64 answer."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.errors import BigbatchError
from oracles import noise as oracle

RAGGED = [3, 9, 1, 6]


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


class Fails(torch.autograd.Function):
    """A copy whose backward raises an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("as asked")


class Experts(nn.Module):
    """Of three experts a micro-batch reaches the one of its size's parity; the third none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.double()

    def forward(self, x):
        return self.shared(x) + self.experts[len(x) % 2](x)


def data(sizes=RAGGED, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 4, generator=draw, dtype=torch.float64).to(dtype),
            torch.randint(3, (n,), generator=draw),
        )
        for n in sizes
    ]


def mean_loss(model, x, y):
    return cross_entropy(model(x).double(), y)


def shares(batches, loss):
    """What each mean loss is multiplied by before its backward."""
    total = sum(len(y) for _, y in batches)
    return [len(y) / total if loss == "weighted" else 1.0 for _, y in batches]


def accumulate(model, batches, loss="weighted", mark=contextlib.nullcontext):
    """The backwards of a step, each inside `mark()`."""
    for (x, y), share in zip(batches, shares(batches, loss), strict=True):
        with mark():
            (mean_loss(model, x, y) * share).backward()


def rows_of(model, batches, loss_of=mean_loss):
    """Mean gradients, one flat row a micro-batch, from `autograd.grad` on a copy."""
    model = copy.deepcopy(model)
    watched = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for x, y in batches:
        parts = torch.autograd.grad(loss_of(model, x, y), watched, materialize_grads=True)
        rows.append(torch.cat([part.flatten().double() for part in parts]))
    return torch.stack(rows)


def expected_of(model, batches, loss="weighted", loss_of=mean_loss):
    """The oracle's answer."""
    rows = rows_of(model, batches, loss_of)
    return getattr(oracle, loss)(rows, [len(y) for _, y in batches])


def same(expected, actual, rel=1e-9):
    """float64 sums in another order agree to 1e-12; no estimate here is a difference near 0."""
    seen = (actual.grad_sqnorm, actual.grad_variance, actual.similarity, actual.noise_scale)
    return pytest.approx(tuple(expected), rel=rel) == seen


def right_or_refused(expected, measure):
    """What must never happen is a plausible wrong number."""
    try:
        actual = measure()
    except BigbatchError:
        return True
    return same(expected, actual)
