"""The table of docs/ranks.md: what is measured and stepped, on which engine, in which precision.

Every cell trains five steps by AdaptiveBatch on real processes, against float64 on one process.
"""

import contextlib
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from numbered_samples import ledger_loader, network, trained_by_groups, whole
from optimizer_table import MAKE
from training_on_ranks import two_rows

pytestmark = [pytest.mark.filterwarnings("ignore:k = :UserWarning")]

STEPS = 5
ENGINES = {"one process": 1, "DDP": 2, "FSDP2": 2, "HSDP": 4}
RULES = ["VRSGD", "VRMomentum", "VRAdam", "VRLARS", "VRLAMB"]
WHAT = ["similarity", "interval", *RULES]
BASES = {"VRSGD": {"gamma": 1.0}, "VRMomentum": {"gamma": 1.0}}
# of the way that the weights went; of a similarity, absolutely. bfloat16 has 8 bits, and a ratio
# of two gradients' small difference to their mean has fewer
CLOSE = {"fp32": 1e-3, "bf16": 0.12}


def engine_of(engine, ranks, precision):
    model = network().float()
    if engine in ("FSDP2", "HSDP"):
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options = {"mp_policy": half} if precision == "bf16" else {}
        mesh = two_rows(ranks) if engine == "HSDP" else None
        fully_shard(model[0], mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options), contextlib.nullcontext
    autocast = precision == "bf16"
    wrapped = DistributedDataParallel(model) if engine == "DDP" else model
    return wrapped, lambda: torch.autocast("cpu", torch.bfloat16, enabled=autocast)


def cell(rank, ranks, engine, what, precision):
    """Records, the groups that the steps compared on this rank, and the weights."""
    model, half = engine_of(engine, ranks, precision)
    make = MAKE[what] if what in RULES else lambda p: torch.optim.SGD(p, lr=0.1)
    train = bb.AdaptiveBatch(
        model,
        make(model.parameters()),
        bb.Batches(ledger_loader(rank, ranks), virtual_ranks=4),
        policy=bb.Fixed(192),
        micro_batch=12,
        lr_scaling=None,
        meter=bb.GradientMeter(model, confidence=0.9 if what == "interval" else None),
        every=1,
    )
    records, groups = [], []
    for step in train:
        numbers = []
        for x, y, number in step:
            with half():
                loss = cross_entropy(model(x.float()).float(), y)
            step.backward(loss)
            numbers.append(number.tolist())
        groups.append(numbers)
        records.append(step.update())
        if len(records) == STEPS:
            break
    return records, groups, [whole(p).double() for p in model.parameters()]


@cache
def exactly(what):
    """One process in float64, with the same groups."""
    model = network()
    make = MAKE[what] if what in RULES else lambda p: torch.optim.SGD(p, lr=0.1)
    train = bb.AdaptiveBatch(
        model,
        make(model.parameters()),
        bb.Batches(ledger_loader(0, 1), virtual_ranks=4),
        policy=bb.Fixed(192),
        micro_batch=12,
        lr_scaling=None,
        meter=bb.GradientMeter(model, confidence=0.9),
        every=1,
    )
    records = []
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(model(x), y))
        records.append(step.update())
        if len(records) == STEPS:
            break
    return records, [p.detach() for p in model.parameters()]


def of_groups(what, steps, **own):
    """One process in float64 that compares the given groups of samples."""
    return trained_by_groups(lambda model: MAKE[what](model.parameters(), **own), steps)


def compared(engine, answers):
    """The groups whose gradients r compares: those of each rank, or what the ranks did together."""
    of_ranks = zip(*(groups for _, groups, _ in answers), strict=True)
    if engine in ("FSDP2", "HSDP"):
        return [
            [list(chain(*together)) for together in zip(*step, strict=True)] for step in of_ranks
        ]
    return [[chunk for rank in step for chunk in rank] for step in of_ranks]


def apart(one, other):
    """Distance of two trainings over the way of the first."""
    way = sum((a - b).square().sum() for a, b in zip(one, network().parameters(), strict=True))
    return (
        (sum((a - b).square().sum() for a, b in zip(one, other, strict=True)) / way).sqrt().item()
    )


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_cell_of_the_table(ranks, engine, what, precision):
    count, close = ENGINES[engine], CLOSE[precision]
    if count == 1:
        answers = [cell(0, 1, engine, what, precision)]
    else:
        answers = ranks(count)(cell, engine, what, precision)
    for _, _, weights in answers[1:]:
        assert all(map(torch.equal, answers[0][2], weights))
    records, _, weights = answers[0]
    if what in RULES:
        steps = compared(engine, answers)
        expected = of_groups(what, steps)
        assert apart(expected, weights) < close
        plain = of_groups(what, steps, gamma=1.0)  # r = 1: what the base rule alone does
        assert apart(expected, plain) > 3 * apart(expected, weights)
        return
    expected, reference = exactly("similarity")
    assert apart(reference, weights) < close
    for local, theirs in zip(expected, records, strict=True):
        assert pytest.approx(local.similarity, abs=close) == theirs.similarity
        assert local.statistics.micro_batches == theirs.statistics.micro_batches
        if what == "interval":
            interval = local.statistics.similarity_interval
            assert pytest.approx(interval, abs=close) == theirs.statistics.similarity_interval


def test_the_page_has_every_cell():
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    table = {row[0]: row[1:] for row in rows}
    assert table["fp32 / bf16"] == list(ENGINES)
    for what in WHAT:
        assert table[f"`{what}`"] == ["works / works"] * len(ENGINES)
