"""Ranks under `bb.advise`: they agree on what is measured, or refuse together."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from advised_loops import network


def train(rank, steps=30, context=bb.advise, join=False, wrap=DistributedDataParallel):
    """A training on ranks; returns the model and the advice."""
    model = wrap(network())
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
    return getattr(model, "module", model), advice


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


def sharded(rank, ranks):
    (model, advice), (alone, _) = (
        train(rank, context=c, wrap=shard) for c in (bb.advise, NoAdvice)
    )
    whole = [[p.full_tensor() for p in each.parameters()] for each in (model, alone)]
    return advice.as_dict(), all(map(torch.equal, *whole))


def shard(model):
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def in_ddp(rank, ranks):
    return train(rank)[1].as_dict()


def test_a_sharded_training_is_measured_as_under_ddp_and_trains_as_alone(ranks):
    """Both compare 8 groups of each rank's backward."""
    expected = {one["step"]: one for one in ranks(2)(in_ddp)[0]["measurements"]}
    for page, is_same in ranks(2)(sharded):
        assert is_same
        assert ("", "FSDP2", "groups") == (
            page["refusal"],
            page["found"]["engine"],
            page["found"]["way"],
        )
        common = [one for one in page["measurements"] if one["step"] in expected]
        assert {16} == {one["micro_batches"] for one in common}
        for one in common:
            near = pytest.approx(expected[one["step"]]["grad_variance"], rel=1e-3)
            assert near == one["grad_variance"]


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


def cut(model):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def in_slices(rank, ranks):
    return train(0, wrap=cut)[1].refusal


def test_tensor_parallelism_is_refused_by_name(ranks):
    assert all("cannot read tensor parallelism" in refusal for refusal in ranks(2)(in_slices))
