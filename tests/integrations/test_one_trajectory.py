"""The same seed, data, settings and virtual ranks: the same batches, whatever trains them."""

from functools import cache
from itertools import islice

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from deepspeed_training import (
    MICRO,
    batches_of,
    controller_of,
    decaying_schedule,
    endless,
    engine_of,
    loss_of,
    network,
    optimizer_of,
    record_values,
    train_in_one_process,
    train_steps,
)

STEPS = 40
ENGINES = [
    ("DDP", 2),
    ("DDP", 3),
    ("FSDP2", 2),
    ("FSDP2", 3),
    ("DeepSpeed 0", 1),
    ("DeepSpeed 1", 3),
    ("DeepSpeed 2", 2),
    ("DeepSpeed 3", 3),
]


def wrapped(engine):
    model = network()
    if engine == "DDP":
        return DistributedDataParallel(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def trained(rank, ranks, engine):
    if engine.startswith("DeepSpeed"):
        adaptive, _, loader, _ = engine_of(rank, ranks, engine[-1])
        return record_values(train_steps(adaptive, loader, STEPS))
    model = wrapped(engine)
    optimizer = optimizer_of(model)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        batches_of(rank, ranks),
        policy=controller_of(),
        micro_batch=MICRO,
        scheduler=decaying_schedule(optimizer),
        every=1,
    )
    records = []
    for step in islice(endless(train), STEPS):
        for x, y in step:
            step.backward(loss_of(model(x), y))
        records.append(step.update())
    return record_values(records)


@cache
def in_one_process():
    records, _ = train_in_one_process(STEPS)
    return records


@pytest.mark.parametrize(("engine", "count"), ENGINES)
def test_the_trajectory_is_that_of_one_process(deepspeed_ranks, engine, count):
    torch.set_num_threads(1)
    expected = in_one_process()
    assert len(set(expected["batch_size"])) > 5
    for actual in deepspeed_ranks(count)(trained, engine):
        for name in ("batch_size", "samples", "epoch"):
            assert expected[name] == actual[name]
        for name in ("similarity", "loss"):
            assert pytest.approx(expected[name], abs=1e-5) == actual[name]
        for local, theirs in zip(expected["lr"], actual["lr"], strict=True):
            assert pytest.approx(max(local), rel=1e-12) == max(theirs)
