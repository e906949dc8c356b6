"""Rows of a backward that belong together: the noise is that of whole batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from advised_loops import advised, sgd

STEPS = 240


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def independent(model, x, y):
    return F.mse_loss(model(x), y)


def mixed(model, x, y):
    """Mixup, as timm has it."""
    x, y = 0.5 * x + 0.5 * x.flip(0), 0.5 * y + 0.5 * y.flip(0)
    return F.mse_loss(model(x), y)


def preferred(model, x, y):
    """DPO's: a pair is a prompt with two answers, in the halves of a doubled batch."""
    chosen, rejected = model(torch.cat([x, x + 0.3 * y[:, :1]]))[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def interleaved(model, x, y):
    """The same, each answer next to the other one."""
    answers = torch.stack([x, x + 0.3 * y[:, :1]], 1).flatten(0, 1)
    chosen, rejected = model(answers)[:, 0].view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


def noise_of_batches(model, loss, batches):
    """B tr Cov(g), over the gradients of batches."""
    rows = []
    for x, y in batches:
        gradients = torch.autograd.grad(loss(model, x, y), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return len(x) * float(torch.stack(rows).double().var(0).sum())


@pytest.mark.parametrize(
    ("loss", "batch", "rows", "ratio"),
    [
        (independent, 16, "", 1.0),
        (mixed, 16, "i and B - 1 - i", 2.0),
        (preferred, 16, "i and i + B / 2", None),
        (preferred, 4, "i and i + B / 2", None),
        (interleaved, 16, "", 1.0),  # a group has four rows, of two pairs
        (interleaved, 4, "next to each other", None),
    ],
)
def test_the_noise_is_that_of_batches(loss, batch, rows, ratio):
    """The rate is so small that the weights stay; a loaded machine measures fewer of 240 steps."""
    torch.manual_seed(1)
    x = torch.randn(batch * STEPS, 6)
    data = TensorDataset(x, x[:, :2] + torch.randn(batch * STEPS, 2))
    loader = DataLoader(data, batch)
    model = network()
    optimizer = sgd(model, lr=1e-12)

    def step(samples):
        optimizer.zero_grad()
        loss(model, *samples).backward()
        optimizer.step()

    expected = noise_of_batches(network(), loss, loader)
    advice = advised(model, optimizer, step, loader)
    assert ("", "groups", batch) == (
        advice.refusal,
        advice.observations.way,
        advice.found.batch_size,
    )
    assert rows == ("" if advice.pairing is None else advice.pairing.rows)
    measured = advice.observations.measurements
    joined = measured if advice.pairing is None else [*map(advice.pairing.join, measured)]
    of_rows, actual = (
        sum(one.statistics.grad_variance for one in each) / len(each) for each in (measured, joined)
    )
    assert pytest.approx(expected, rel=0.3) == actual
    assert ratio is None or pytest.approx(ratio * of_rows, rel=0.3) == actual
    assert (advice.pairing is not None) == ("so the groups that have them" in str(advice))
