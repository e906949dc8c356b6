"""What a meter sends: a process group that counts shows every collective and its bytes."""

from collections import Counter
from functools import partial

import pytest
import torch

from bigbatch import GradientMeter
from bigbatch.gradients.fsdp2 import ShardedSource
from bigbatch.statistics.second_moment import GradientMoments
from counting_groups import ENGINES
from training_on_ranks import EQUAL, accumulate, network

STEPS = 3
FLOAT64 = 8
SKETCH = 1021
PARAMETERS = [60, 12, 84, 7, 21, 3]  # of the network


def sent_by_step(rank, ranks, *, engine, options, always_sync=False, moments=False):
    """Every step's collectives on each of this rank's groups; without options, no meter."""
    model, groups = ENGINES[engine][0](network(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = None if options is None else GradientMeter(model, **options)
    source = ShardedSource(model.parameters()) if moments else None
    if source is not None:
        source.subscribe(GradientMoments())
    steps = []
    for step in range(STEPS):
        for group in groups:
            group.sent.clear()
        accumulate(model, rank, step, EQUAL, always_sync=always_sync)
        if meter is not None:
            meter.read(EQUAL[rank])
        optimizer.step()
        if source is not None:
            assert source.micro_batches == len(EQUAL[rank])
            source.restart()
        optimizer.zero_grad()
        steps.append([list(group.sent) for group in groups])
    return steps


def extra(ranks, engine, options, **how):
    """What the meter sends over a run without: for each rank, step and group, sorted."""
    count = ENGINES[engine][1]
    plain = ranks(count)(partial(sent_by_step, engine=engine, options=None, **how))
    metered = ranks(count)(partial(sent_by_step, engine=engine, options=options, **how))
    return [
        [
            sorted((Counter(with_meter) - without(more, with_meter)).elements())
            for more, with_meter in zip(*groups, strict=True)
        ]
        for of_rank in zip(plain, metered, strict=True)
        for groups in zip(*of_rank, strict=True)
    ]


def without(plain, metered):
    """What a run without meter sends, all of which is sent with one."""
    assert plain
    assert not Counter(plain) - Counter(metered)
    return Counter(plain)


def scalars(layers=1):
    """Three sums a layer, and 29 others."""
    return FLOAT64 * (3 * layers + 29)


def compared(engine):
    """Seven numbers of each rank, in the first measured steps."""
    return "all-reduce", FLOAT64 * 7 * ENGINES[engine][1]


def every_step(engine, *collectives):
    groups, collectives = 2 if engine == "hsdp" else 1, (*collectives, compared(engine))
    return [[sorted(collectives)] * groups] * STEPS * ENGINES[engine][1]


@pytest.mark.parametrize("always_sync", [False, True], ids=["no_sync", "sync"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_meter_adds_one_all_reduce_of_scalars_a_step(ranks, engine, always_sync):
    expected = every_step(engine, ("all-reduce", scalars()))
    assert expected == extra(ranks, engine, {}, always_sync=always_sync)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_add_three_scalars_each(ranks, engine):
    expected = every_step(engine, ("all-reduce", scalars(layers=3)))
    assert expected == extra(ranks, engine, {"per_layer": True})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interval_adds_a_sketch_and_one_all_reduce_of_two_scalars(ranks, engine):
    expected = every_step(
        engine, ("all-reduce", scalars() + FLOAT64 * (SKETCH + 1)), ("all-reduce", FLOAT64 * 2)
    )
    assert expected == extra(ranks, engine, {"confidence": 0.9})


@pytest.mark.parametrize("engine", ENGINES)
def test_halves_send_one_gradient_more(ranks, engine):
    whole = [("all-reduce", 4 * elements) for elements in PARAMETERS]
    expected = every_step(engine, ("all-reduce", scalars() + FLOAT64 * 2), *whole)
    assert expected == extra(ranks, engine, {"half_batch_cosine": True})


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_that_every_leaves_out_send_nothing(ranks, engine):
    count = ENGINES[engine][1]
    groups = 2 if engine == "hsdp" else 1
    once = sorted([("all-reduce", scalars()), compared(engine)])
    read, left_out = [once] * groups, [[]] * groups
    assert [read, left_out, read] * count == extra(ranks, engine, {"every": 2})


@pytest.mark.parametrize("engine", ["fsdp2", "hsdp"])
def test_second_moments_of_sharded_gradients_send_nothing(ranks, engine):
    run = partial(sent_by_step, engine=engine, options=None, always_sync=True)
    count = ENGINES[engine][1]
    assert ranks(count)(run) == ranks(count)(partial(run, moments=True))
