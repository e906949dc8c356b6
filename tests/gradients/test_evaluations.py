"""Forwards without backward under fully_shard, which leave whole parameters in the modules."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from numbered_samples import Numbered, ledger_loader, network, whole
from optimizer_table import MAKE
from training_on_ranks import two_rows

MAKE = MAKE | {"SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)}


def nested(model, **options):
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def frozen(model):
    model[0].requires_grad_(False)
    return nested(model)


SHARDED = {  # on so many ranks
    "nested": (2, nested),
    "root alone": (2, fully_shard),
    "whole after a forward": (2, lambda model: nested(model, reshard_after_forward=False)),
    "in shards after a forward": (2, lambda model: nested(model, reshard_after_forward=True)),
    "over two ranks after a forward": (4, lambda model: nested(model, reshard_after_forward=2)),
    "hsdp": (4, lambda model: nested(model, mesh=two_rows(4))),
    "frozen layer": (2, frozen),
    "offloaded": (2, lambda model: nested(model, offload_policy=CPUOffloadPolicy(False))),
}


def trained(rank, ranks, sharded, name, evaluates):
    """The weights after three steps, with or without evaluations wherever one can be."""
    model = SHARDED[sharded][1](network())
    held_out = Numbered(32).x

    def evaluate():
        if evaluates:
            with torch.no_grad():
                model(held_out)

    optimizer = MAKE[name](p for p in model.parameters() if p.requires_grad)
    evaluate()
    meter = bb.GradientMeter(model, per_layer=True)
    evaluate()
    loader = ledger_loader(rank, ranks)
    train = bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.Fixed(32 * ranks), micro_batch=4, meter=meter, every=1
    )
    evaluate()
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(model(x), y))
            evaluate()
        step.clip_grad_norm_(1.0)
        evaluate()
        record = step.update()
        evaluate()
        train.state_dict()
        if train.steps == 3:
            break
    model.zero_grad()
    return record.similarity, [whole(p) for p in model.state_dict().values()]


@pytest.mark.parametrize("name", ["SGD", "VRAdam"])
@pytest.mark.parametrize("sharded", SHARDED)
def test_evaluations_change_nothing_wherever_they_are(ranks, sharded, name):
    count, _ = SHARDED[sharded]
    expected = ranks(count)(trained, sharded, name, False)
    actual = ranks(count)(trained, sharded, name, True)
    for (similarity, weights), (alike, same) in zip(expected, actual, strict=True):
        assert similarity == alike
        assert all(map(torch.equal, weights, same))


def made_late(rank, ranks, shard, make):
    """What is said to an optimizer that was made of the parameters that a forward has left."""
    model = SHARDED[shard][1](network())
    with torch.no_grad():
        model(Numbered(4).x)
    with pytest.raises((SettingError, GradientError)) as refused:
        make(model)
    return str(refused.value)


def adapting(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bb.AdaptiveBatch(model, optimizer, DataLoader(Numbered(64), 16), policy=bb.Fixed(32), every=1)


def by_itself(model):
    optimizer = MAKE["VRSGD"](model.parameters())
    model(Numbered(4).x).square().mean().backward()
    optimizer.step()


def measured(model):
    with bb.GradientMeter(model.parameters()):
        model(Numbered(4).x).square().mean().backward()


def tried_out(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = lambda batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    bb.largest_micro_batch(model, optimizer, DataLoader(Numbered(64), 16), loss_of, most=16)


LATE = [
    (2, "nested", adapting, "is whole, and the model sharded"),
    (2, "nested", tried_out, "holds other parameters than the model"),
    (2, "nested", by_itself, "2 of 4 parameters are sharded"),
    (2, "root alone", by_itself, "after it"),
    (1, "root alone", by_itself, "were freed in the backward"),
    (1, "root alone", measured, "were freed in the backward"),
]


@pytest.mark.parametrize(("count", "shard", "make", "words"), LATE)
def test_who_has_the_whole_parameters_learns_when_to_take_them(ranks, count, shard, make, words):
    for message in ranks(count)(made_late, shard, make):
        assert words in message
        assert "before any forward" in message


def tried(rank, ranks):
    """The largest micro-batch of a model that was evaluated before."""
    model = nested(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [whole(p) for p in model.parameters()]
    with torch.no_grad():
        model(Numbered(4).x)
    loader = DataLoader(Numbered(64), 16)
    loss_of = lambda batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    size = bb.largest_micro_batch(model, optimizer, loader, loss_of, most=16)
    after = [whole(p) for p in model.state_dict().values()]
    assert all(map(torch.equal, before, after))
    return size


def test_the_largest_micro_batch_is_found_after_an_evaluation_too(ranks):
    assert [16, 16] == ranks(2)(tried)
