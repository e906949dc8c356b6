"""Ranks whose optimizers would step differently: every rank raises, with both values."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import bigbatch as bb
from bigbatch.errors import RankError
from bigbatch.optim import VRSGD, VarianceReduced
from numbered_samples import ledger_loader, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:k = ")


def loop(rank, ranks, make, engine="ddp"):
    model = wrapped(engine, ranks)
    optimizer = make(rank, list(model.parameters()))
    batches = bb.Batches(ledger_loader(rank, ranks), virtual_ranks=ranks)
    settings = {"policy": bb.Fixed(64), "micro_batch": 8}
    return bb.AdaptiveBatch(model, optimizer, batches, **{"every": 1, **settings})


def tensor_rate(rank, parameters):
    rate = torch.tensor(0.1 * (1 + rank), dtype=torch.float64)
    return Adam(parameters, lr=rate, capturable=False)


OTHERS = {
    "lr": (
        lambda rank, p: SGD(p, lr=0.1 * (1 + rank)),
        "lr of parameter group 0 is 0.2 there and 0.1 on rank 0",
    ),
    "lr as a tensor": (tensor_rate, "lr of parameter group 0 is 0.2 there and 0.1 on rank 0"),
    "class": (
        lambda rank, p: (Adam if rank else SGD)(p, lr=0.1),
        "the optimizer is Adam there and SGD on rank 0",
    ),
    "gamma": (
        lambda rank, p: VRSGD(p, lr=0.1, gamma=0.2 if rank else 0.1),
        "gamma of parameter group 0 is 0.2 there and 0.1 on rank 0",
    ),
    "base": (
        lambda rank, p: VarianceReduced((Adam if rank else SGD)(p, lr=0.1)),
        "VarianceReduced of Adam there and VarianceReduced of SGD",
    ),
    "betas": (
        lambda rank, p: Adam(p, lr=0.1, betas=(0.9, 0.9 if rank else 0.999)),
        "betas of parameter group 0 is (0.9, 0.9) there and (0.9, 0.999) on rank 0",
    ),
    "parameters": (
        lambda rank, p: SGD(p[rank:], lr=0.1),
        "the parameters of group 0 is 3 tensors there and 4 tensors on rank 0",
    ),
}


def built_with(rank, ranks, name):
    make, _ = OTHERS[name]
    with pytest.raises(RankError) as error:
        loop(rank, ranks, make)
    return str(error.value)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused_with_both_values(ranks, name):
    for message in ranks(2)(built_with, name):
        assert "rank 1 disagrees with rank 0 on their settings" in message
        assert OTHERS[name][1] in message


def changed_later(rank, ranks, engine, change):
    train = loop(rank, ranks, lambda rank, p: SGD(p, lr=0.1), engine)
    scheduler = StepLR(train.optimizer, step_size=1, gamma=0.5)
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(train.model(x), y))
        if train.steps:
            with pytest.raises(RankError) as error:
                step.update()
            return train.steps, str(error.value)
        step.update()
        if rank == 1 and change == "scheduler":
            scheduler.step()
        elif rank == 1:
            train.optimizer.param_groups[0]["momentum"] = 0.5
    raise AssertionError


CHANGES = {
    "scheduler": "lr of parameter group 0 is 0.05 there and 0.1 on rank 0",
    "momentum": "momentum of parameter group 0 is 0.5 there and 0 on rank 0",
}


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_an_optimizer_that_one_rank_alone_changes_ends_the_next_step(ranks, engine, change):
    for steps, message in ranks(2)(changed_later, engine, change):
        assert 1 == steps
        assert "rank 1 disagrees with rank 0 on what decides a step" in message
        assert CHANGES[change] in message
