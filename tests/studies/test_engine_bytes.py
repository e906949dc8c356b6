"""What ranks send, counted by real processes, is what the formulas say."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from studies import comm_bytes, scaling
from studies.engine_steps import kinds
from studies.engines import measure_kinds
from studies.gloo_processes import on_ranks

WIDTH = 96  # 2, 3 and 4 divide it
MODEL = replace(kinds("DDP", 2)[0], width=WIDTH).size
LAYERS = 16
RELEASE = pytest.mark.release
DEEPSPEED = pytest.mark.deepspeed
# each runs twenty kinds of steps on so many ranks
every_count = pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=RELEASE), pytest.param(4, marks=RELEASE)]
)


@cache
def counted(ranks, engine):
    """Every kind of step of an engine, by name."""
    small = [replace(kind, width=WIDTH) for kind in kinds(engine, ranks)]
    return {row.kind.what: row for row in on_ranks(ranks, partial(measure_kinds, small, 1))}


def handed(ranks, engine, what):
    """Bytes by collective."""
    return Counter(counted(ranks, engine)[what].input_bytes)


@pytest.mark.thorough
@every_count
def test_plain_steps_send_what_the_formulas_say(ranks):
    assert scaling.plain_ddp(MODEL) == handed(ranks, "DDP", "plain")
    assert scaling.plain_ddp(MODEL) == handed(ranks, "DDP", "plain, a = 4")
    assert scaling.plain_fsdp2(MODEL, ranks) == handed(ranks, "FSDP2", "plain")
    assert scaling.plain_fsdp2(MODEL, ranks, 4) == handed(ranks, "FSDP2", "plain, a = 4")


@pytest.mark.thorough
@every_count
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_measuring_adds_scalars(ranks, engine):
    # of one of the first measured steps
    compared = handed(ranks, engine, "plain") + Counter(scaling.compared_ranks(ranks))
    assert compared + Counter(scaling.similarity()) == handed(ranks, engine, "similarity")
    with_interval = handed(ranks, engine, "similarity and interval")
    assert compared + Counter(scaling.interval()) == with_interval
    assert 8 * 32 == scaling.similarity()["all-reduce"]


@every_count
def test_variance_reduction_under_ddp_sends_a_plain_all_reduce_or_a_quarter_more(ranks):
    whole = scaling.vr_ddp(MODEL, ranks, accumulated=False)
    quarter = scaling.vr_ddp(MODEL, ranks, accumulated=True)
    assert whole == handed(ranks, "DDP", "VR, k = ranks")
    assert quarter == handed(ranks, "DDP", "VR, a = 4, M2 in bfloat16")
    plain = scaling.bytes_sent(scaling.plain_ddp(MODEL), ranks)
    scalars = 2 * 8 * 3 * LAYERS + 40 * ranks
    assert plain <= counted(ranks, "DDP")["VR, k = ranks"].sent <= plain + scalars
    accumulated = counted(ranks, "DDP")["VR, a = 4, M2 in bfloat16"].sent
    assert 1.25 * plain <= accumulated <= 1.25 * plain + scalars


@every_count
def test_variance_reduction_under_fsdp2_adds_two_doubles_a_layer(ranks):
    more = handed(ranks, "FSDP2", "VR, a = 4") - handed(ranks, "FSDP2", "plain, a = 4")
    assert {"all-reduce": 8 * 2 * LAYERS} == scaling.vr_fsdp2(MODEL) == more


@pytest.mark.thorough
@DEEPSPEED
@pytest.mark.parametrize("engine", ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_measuring_under_deepspeed_adds_scalars(engine):
    more = handed(2, engine, "similarity, a = 4") - handed(2, engine, "plain, a = 4")
    assert {"all-reduce"} == set(more)
    compared = scaling.compared_ranks(2)["all-reduce"]
    scalars = scaling.similarity()["all-reduce"]  # and what AdaptiveBatch adds
    assert scalars <= more["all-reduce"] - compared <= scaling.loop()["all-reduce"] + 64


@pytest.mark.thorough
@DEEPSPEED
@pytest.mark.parametrize(("engine", "times"), [("ZeRO-0", 4), ("ZeRO-1", 4)])
def test_variance_reduction_reduces_every_micro_batch_at_stages_0_and_1(engine, times):
    plain, reduced = (handed(2, engine, what) for what in ("plain, a = 4", "VR, a = 4"))
    assert plain["all-gather"] == reduced["all-gather"]
    assert 0 <= reduced["all-reduce"] - times * 4 * MODEL.parameters < 1000


@pytest.mark.thorough
@DEEPSPEED
@pytest.mark.parametrize("engine", ["ZeRO-2", "ZeRO-3"])
def test_variance_reduction_adds_scalars_at_stages_2_and_3(engine):
    more = handed(2, engine, "VR, a = 4") - handed(2, engine, "similarity, a = 4")
    assert more.total() <= 8 * 2 * LAYERS + 8 * 16


def loop_steps(rank):
    """What `AdaptiveBatch` hands over at each step, one micro-batch a rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    data = TensorDataset(torch.randn(144, 4), torch.randint(3, (144,)))
    loader = DataLoader(data, batch_size=4, sampler=bb.ElasticDistributedSampler(data))
    train = bb.AdaptiveBatch(
        model, torch.optim.SGD(model.parameters(), 0.1), loader, policy=bb.Fixed(12), every=1
    )
    (group,) = comm_bytes.counting_groups()
    for _ in train.epochs(1):
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            step.update()
            yield list(group.sent)
            group.sent.clear()


def test_the_loop_sends_as_many_sums_on_any_number_of_ranks_and_compares_ranks_now_and_then():
    ranks, gradient = 3, 4 * 15
    steps = [by_collective(sent) for sent in on_ranks(ranks, loop_steps)]
    expected = Counter({"all-reduce": gradient}) + Counter(scaling.loop())
    assert expected + Counter(scaling.compared_ranks(ranks)) == steps[2]
    assert [expected] * 2 == steps[8:10]


def by_collective(handed):
    totals = Counter()
    for collective, size in handed:
        totals[collective] += size
    return totals


@pytest.mark.thorough
def test_the_formulas_table_has_the_shares_that_the_formulas_give():
    rows = list(scaling.rows())
    assert 11 == len(rows)  # the largest does not fit on 8
    assert 1 == len({tuple(row) for row in rows})  # the same columns
    resnet = next(row for row in rows if (row["model"], row["ranks"]) == ("ResNet-50", "8,192"))
    share = 8 * 32 / (4 * 25_600_000)
    assert f"{share:.2g}" == resnet["similarity"]
