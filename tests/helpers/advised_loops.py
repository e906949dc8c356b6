"""Small loops as users write them, which train alone or under `bb.advise`."""

import torch
from torch import nn
from torch.nn import functional as F

import bigbatch as bb
from bigbatch.advisor.advise import Advice


def network(*parts, seed=0):
    """A network of 6 inputs and 2 outputs, with these modules in the middle."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), *parts, nn.Tanh(), nn.Linear(8, 2))


def batches(steps=30, size=16, seed=1):
    """A batch for each backward."""
    draw = torch.Generator().manual_seed(seed)
    shape = (size, 6)
    return [
        (torch.randn(shape, generator=draw), torch.randn(size, 2, generator=draw) + 1)
        for _ in range(steps)
    ]


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def advised(model, optimizer, step, data=None, **limits) -> Advice:
    """Trains under advice, by `step(batch)` or `step(model, optimizer, batch)`."""
    is_plain = step is plain_step
    with bb.advise(model, optimizer, **limits) as advice:
        for batch in batches() if data is None else data:
            step(model, optimizer, batch) if is_plain else step(batch)
    return advice


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05} | settings)
