"""Ranks under `bb.advise`: they agree on what is measured, or refuse together."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from advised_loops import network


def train(rank, steps=30, context=bb.advise, join=False):
    """A DDP training; returns weights and advice."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)

    def loop():
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(16, 6, generator=draw)
            F.mse_loss(model(x), torch.randn(16, 2, generator=draw) + 1).backward()
            optimizer.step()

    with context(model, optimizer) as advice:
        if join:
            with model.join():
                loop()
        else:
            loop()
    return model.module, advice


class NoAdvice:
    def __init__(self, *_):
        self.refusal = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def two_trainings(rank, ranks):
    """The first is too short; the second has to ask the other ranks again."""
    short, (model, advice) = train(rank, steps=2)[1], train(rank)
    return short.refusal, advice.refusal, advice.as_dict()["measurements"], model.state_dict()


def alone(rank, ranks):
    train(rank, steps=2, context=NoAdvice)
    return train(rank, context=NoAdvice)[0].state_dict()


def joined(rank, ranks):
    return train(rank, steps=30 - 10 * rank, join=True)[1].refusal


@pytest.mark.early
def test_a_process_may_be_observed_twice_and_trains_as_alone(ranks):
    found, expected = ranks(2)(two_trainings), ranks(2)(alone)
    for short, refusal, measurements, state in found:
        assert "at least 6 are needed" in short
        assert "" == refusal
        assert found[0][2] == measurements != []
        assert all(torch.equal(state[name], weight) for name, weight in expected[0].items())


def test_ranks_that_may_end_at_different_steps_are_refused(ranks):
    assert all("join()" in refusal for refusal in ranks(2)(joined))
