"""The table of docs/deepspeed.md cell by cell, and what ranks add, on real processes."""

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.errors import SettingError
from deepspeed_training import (
    ACCUMULATION,
    BATCH,
    CLIP,
    LAYOUTS,
    config_of,
    data,
    engine_of,
    max_difference,
    micro_step,
    network,
    optimizer_of,
    quiet,
    record_values,
    train_in_one_process,
    train_steps,
    weights_of,
)

STEPS = 16
RANKS = [1, 2, 3]
DTYPES = ["fp32", "bf16"]
CELLS = [
    (layout, dtype)
    for layout in LAYOUTS
    for dtype in DTYPES
    if (layout, dtype) != ("1, fp32 accumulation", "fp32")  # which accumulates so anyway
]
# absolutely; bfloat16 has 8 bits, and float32 sums come in another order on other ranks
SIMILAR = {"fp32": 1e-6, "bf16": 2e-2}
NEAR = {"fp32": 1e-6, "bf16": 1e-2}


@cache
def reference(weighted=False):
    return train_in_one_process(STEPS, clip=CLIP, weighted=weighted)


def cell(rank, ranks, layout, dtype, weighted=False, how=None):
    engine, _, loader, _ = engine_of(rank, ranks, layout, dtype, clip=CLIP, **(how or {}))
    records = train_steps(engine, loader, STEPS, weighted=weighted)
    counted = engine.global_samples, engine.global_steps
    return record_values(records), weights_of(engine), counted


def assert_as_in_one_process(answers, dtype, weighted=False):
    expected, weights = reference(weighted)
    for actual, local, counted in answers:
        assert expected["batch_size"] == actual["batch_size"]
        assert expected["lr"] == actual["lr"]
        assert pytest.approx(expected["similarity"], abs=SIMILAR[dtype]) == actual["similarity"]
        assert pytest.approx(expected["loss"], abs=NEAR[dtype]) == actual["loss"]
        assert NEAR[dtype] > max_difference(weights, local)
        assert (sum(expected["batch_size"]), STEPS) == counted


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize(("layout", "dtype"), CELLS)
def test_a_cell_of_the_table(deepspeed_ranks, layout, dtype, count):
    assert_as_in_one_process(deepspeed_ranks(count)(cell, layout, dtype), dtype)


def budgeted(rank, ranks, layout):
    """(measured steps, whether the last similarity is kept, values, weights) under every=3."""
    engine, _, loader, _ = engine_of(rank, ranks, layout, clip=CLIP, every=3)
    records = train_steps(engine, loader, STEPS)
    measured = [r for r in records if r.statistics is not None]
    kept = measured[-1].similarity == pytest.approx(engine.cos_placeholder.item())
    kept = kept and all(value == value for value in engine._similarities.values())
    return [r.step for r in measured], kept, record_values(records), weights_of(engine)


@pytest.mark.parametrize("layout", ["0", "2", "3"])
def test_one_step_in_three_is_measured(deepspeed_ranks, layout):
    expected, weights = train_in_one_process(STEPS, clip=CLIP, every=3)
    for steps, kept, actual, own in deepspeed_ranks(2)(budgeted, layout):
        assert [*range(1, STEPS + 1, 3)] == steps
        assert kept
        assert expected["batch_size"] == actual["batch_size"]
        assert pytest.approx(expected["loss"], abs=NEAR["fp32"]) == actual["loss"]
        assert NEAR["fp32"] > max_difference(weights, own)


def test_the_page_has_every_cell():
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    table = {row[0]: row[1:] for row in rows}
    assert table["ZeRO stage"] == [*DTYPES, "fp16"]
    for layout in LAYOUTS:
        works = ["works" if (layout, dtype) in CELLS else "-" for dtype in DTYPES]
        assert table[f"`{layout}`"] == [*works, "refused"]


def test_the_table_is_of_batches_that_grow_shrink_and_are_clipped():
    sizes = reference()[0]["batch_size"]
    assert {True, False} == {b > a for a, b in pairwise(sizes)}
    assert max_difference(reference()[1], train_in_one_process(STEPS)[1]) > 1e-3
    assert reference()[0]["epoch"][-1] > 0


SMALL = {"reduce_bucket_size": 20, "allgather_bucket_size": 20}
OPTIONS = {
    "0 two groups": ("0", {"groups": 2}),
    "0 predivided": ("0", {"more": {"prescale_gradients": True, "gradient_predivide_factor": 2.0}}),
    "1 two groups, small buckets": ("1", {"groups": 2, "more": {"zero": SMALL}}),
    "2 two groups, small buckets": ("2", {"groups": 2, "more": {"zero": SMALL}}),
    "2 overlapped": ("2", {"more": {"zero": {"overlap_comm": True, **SMALL}}}),
    "2 round robin": ("2", {"more": {"zero": {"round_robin_gradients": True}}}),
    "2 not contiguous": ("2", {"more": {"zero": {"contiguous_gradients": False}}}),
    "2 offload, two groups": ("2, CPU offload", {"groups": 2}),
    "3 two groups, small buckets": (
        "3",
        {"groups": 2, "more": {"zero": {"reduce_bucket_size": 20}}},
    ),
    "3 sub-groups": ("3", {"more": {"zero": {"sub_group_size": 10}}}),
    "3 nothing persists": (
        "3",
        {"more": {"zero": {"stage3_param_persistence_threshold": 0, "overlap_comm": True}}},
    ),
    "3 offload, two groups": ("3, CPU offload", {"groups": 2}),
    "3 parameters offloaded": ("3", {"more": {"zero": {"offload_param": {"device": "cpu"}}}}),
}


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def test_autocast_to_bfloat16_is_as_close_as_bfloat16(deepspeed_ranks):
    pool = deepspeed_ranks(2)
    for layout in ("0", "2", "3"):
        answers = pool(cell, layout, "fp32", False, {"more": AUTOCAST})
        assert_as_in_one_process(answers, "bf16")


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_zero_change_nothing(deepspeed_ranks, option):
    layout, how = OPTIONS[option]
    assert_as_in_one_process(deepspeed_ranks(2)(cell, layout, "fp32", False, how), "fp32")


@pytest.mark.parametrize(("layout", "dtype"), [cell for cell in CELLS if cell[1] == "fp32"])
def test_losses_that_are_means_over_tokens_weigh_by_them(deepspeed_ranks, layout, dtype):
    """The weights of a step are known at its end, where the gradient is scaled in its place."""
    assert_as_in_one_process(deepspeed_ranks(2)(cell, layout, dtype, True), dtype, True)


# faults


def poisoned(rank, ranks, layout, dtype):
    """A step in whose middle one rank's gradient is not finite; before, within, and two later."""
    engine, _, loader, scheduler = engine_of(rank, ranks, layout, dtype, clip=CLIP)
    before, plan = train_steps(engine, loader, 2), engine.bigbatch.plan
    weights, ticks = weights_of(engine), scheduler.last_epoch
    micro_batches, ends, number = iter(loader), False, 0
    while not ends:
        x, y = next(micro_batches)
        bad = rank == ranks - 1 and number == 1
        ends = micro_step(engine, x, y, factor=float("nan") if bad else 1.0)
        number += 1
    skipped = engine.bigbatch.record
    found = {
        "applied": engine.was_step_applied(),
        "counted": (engine.bigbatch.skipped, engine.skipped_steps, engine.bigbatch.steps),
        "same weights": all(map(torch.equal, weights, weights_of(engine))),
        "same plan": plan == engine.bigbatch.plan,
        "same tick": ticks == scheduler.last_epoch,
        "same target": before[-1].decision.batch_size == skipped.decision.batch_size,
    }
    after = train_steps(engine, micro_batches, 2)
    finite = all(bool(w.isfinite().all()) for w in weights_of(engine))
    moved = max_difference(weights, weights_of(engine)) > 0
    return found, record_values([*before, skipped, *after]), finite and moved


@pytest.mark.parametrize(("layout", "dtype"), CELLS)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    deepspeed_ranks, layout, dtype
):
    expected = {
        "applied": False,
        "counted": (1, 1, 2),
        "same weights": True,
        "same plan": True,
        "same tick": True,
        "same target": True,
    }
    for found, records, goes_on in deepspeed_ranks(2)(poisoned, layout, dtype):
        assert expected == found
        assert [False, False, True, False, False] == records["skipped"]
        assert goes_on


def refusal(rank, ranks, more):
    width = 8  # which two ranks can divide
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    try:
        engine_of(rank, ranks, more={"gradient_accumulation_steps": 1, **more}, model=model)
    except SettingError as error:
        return str(error)
    return "built"


COLUMNS = {"patterns": [".*0\\.weight$"], "partition_type": "column"}
SHARED = {
    "tensor or model parallelism: ": {
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": [COLUMNS]},
        }
    },
    "sequence parallelism: ": {"sequence_parallel_size": 2, "data_parallel_size": 1},
}


@pytest.mark.parametrize("named", SHARED)
def test_ranks_that_share_samples_are_refused(deepspeed_ranks, named):
    for message in deepspeed_ranks(2)(refusal, SHARED[named]):
        assert message.startswith(named)


# what is sent


def collectives_of(rank, ranks, layout, adapts):
    """How often each kind of collective ran in the ninth update, of three micro-batches a rank.

    The first eight measured steps compare the ranks too.
    """
    import deepspeed

    quiet()
    model = network()
    given = {"model": model, "optimizer": optimizer_of(model), "config": config_of(ranks, layout)}
    if adapts:
        still = {"training_data": None, "policy": bb.Fixed(BATCH), "adaptive_batch_params": None}
        engine = engine_of(rank, ranks, layout, **{**given, **still})[0]
    else:
        engine = deepspeed.initialize(**given)[0]
    x, y = data()[:8]
    for _ in range(8 * ACCUMULATION // ranks):
        micro_step(engine, x + rank, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(ACCUMULATION // ranks):
            micro_step(engine, x + rank, y)
    return Counter(e.name for e in profile.events() if e.name.startswith("gloo:"))


@pytest.mark.parametrize("layout", ["0", "1", "2", "3"])
def test_an_update_sends_what_deepspeed_sends_and_one_all_reduce_more(deepspeed_ranks, layout):
    pool = deepspeed_ranks(2)
    plain, ours = (pool(collectives_of, layout, adapts)[0] for adapts in (False, True))
    assert plain
    assert Counter({"gloo:all_reduce": 1}) == ours - plain
    assert not plain - ours
    if layout in ("0", "1"):  # once an update; 2 and 3 in every backward
        assert plain == pool(collectives_of_one, layout)[0]


def collectives_of_one(rank, ranks, layout):
    """The same of an update that is one micro-batch."""
    import deepspeed

    quiet()
    model = network()
    config = config_of(ranks, layout) | {"gradient_accumulation_steps": 1}
    engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    x, y = data()[:24]
    micro_step(engine, x, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        micro_step(engine, x, y)
    return Counter(e.name for e in profile.events() if e.name.startswith("gloo:"))
