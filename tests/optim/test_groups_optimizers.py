"""Variance-reduced optimizers with groups of one backward: the steps of as many backwards."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError
from bigbatch.optim import VRAdam
from group_gradients import loop, sizes_of
from optimizer_table import MAKE, VR
from oracles import vr
from tensors import difference, values

torch.set_num_threads(1)
K, STEPS = 8, 4
CLOSE = 1e-9  # as in test_vr_optimizers.py: a weight whose gradients agree loses some digits


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def data(n=96):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (n,), generator=draw))


def loss_of(model, x, y):
    return cross_entropy(model(x), y)


def trained(name, batch, settings):
    model = network()
    optimizer = MAKE[name](model.parameters())
    loader = DataLoader(data(), batch)
    train = bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.Fixed(batch), every=1, lr_scaling=None, **settings
    )
    noise = []
    for step in train:
        for x, y in step:
            step.backward(loss_of(model, x, y))
        noise.append(step.update().statistics.grad_variance)
        if len(noise) == STEPS:
            return model, noise
    raise AssertionError


@pytest.mark.parametrize("batch", [16, 24])
@pytest.mark.parametrize("name", VR)
def test_groups_of_a_backward_are_the_micro_batches_of_a_step(name, batch):
    one, noise = trained(name, batch, {"groups": K, "micro_batch": batch})
    eight = {"micro_batch": batch // K, "min_micro_batches": K}
    expected, expected_noise = trained(name, batch, eight)
    assert difference(expected, one) < CLOSE
    assert pytest.approx(expected_noise, rel=1e-9) == noise


def mean_rows(model, batch):
    """The mean gradient of each group, by parameter."""
    sizes = sizes_of(len(batch[0]), K)
    rows = loop(model, batch, K, loss_of)
    return [[g * (sum(sizes) / n) for g, n in zip(row, sizes, strict=True)] for row in rows]


def test_groups_of_unequal_sizes_have_their_weights():
    """21 samples in 8 groups of 3 and 2, twice in a step, against the oracle."""
    model, copied = network(), network()
    oracle = vr.VRAdam(values(model), lr=0.02)
    optimizer = VRAdam(model.parameters(), lr=0.02)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        DataLoader(data(84), 21),
        policy=bb.Fixed(42),
        every=1,
        groups=K,
        lr_scaling=None,
    )
    for step in train:
        with torch.no_grad():
            for own, theirs in zip(copied.parameters(), oracle.params, strict=True):
                own.copy_(theirs)
        first, second = ([*batch] for batch in _run(step, model))
        rows = zip(mean_rows(copied, first), mean_rows(copied, second), strict=True)
        oracle.step([[*a, *b] for a, b in rows], 2 * sizes_of(21, K))
        step.update()
        assert difference(oracle.params, model) < CLOSE


def _run(step, model):
    for batch in step:
        step.backward(loss_of(model, *batch))
        yield batch


def test_groups_do_not_reach_an_optimizer_without_adaptive_batch():
    """Its own loop sees backwards, so it says how many it saw."""
    model = network()
    optimizer = VRAdam(model.parameters(), lr=0.02)
    with bb.GradientMeter(model, groups=K) as meter:
        x, y = data(16).tensors
        loss_of(model, x, y).backward()
        meter.read(samples=[16])
        with pytest.raises(GradientError, match="saw 1 backward"):
            optimizer.step()
