"""AdaptiveBatch with variance-reduced optimizers on real ranks: the steps of one process."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.measure.source import PlainSource
from test_ranks_loop import Numbered, ledger_loader, network, together, whole, wrapped
from test_ranks_optimizers import MAKE, VR

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.filterwarnings("ignore:k = :UserWarning"),
]

every_vr_optimizer = pytest.mark.parametrize("name", VR)


def build(rank, ranks, engine, name, virtual_ranks=4, **settings):
    model = wrapped(engine, ranks)
    optimizer = MAKE[name](model.parameters())
    batches = bb.Batches(ledger_loader(rank, ranks), virtual_ranks=virtual_ranks)
    settings = {
        "policy": bb.SimiGrad(target=0.3, min_batch=32, max_batch=300),
        "batch_size": 64,
        "micro_batch": 12,
    } | settings
    return bb.AdaptiveBatch(model, optimizer, batches, **settings)


def run(rank, ranks, engine, name, updates, clip=None):
    train = build(rank, ranks, engine, name)
    done = []
    for _ in train.epochs(10**9):
        for step in train:
            numbers = []
            for x, y, number in step:
                step.backward(cross_entropy(train.model(x), y))
                numbers.append(number.tolist())
            if clip is not None:
                step.clip_grad_norm_(clip)
            done.append((numbers, step.update()))
            if len(done) == updates:
                return (
                    [numbers for numbers, _ in done],
                    [record for _, record in done],
                    [whole(p) for p in train.model.parameters()],
                )
    raise AssertionError


@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
@every_vr_optimizer
def test_a_loop_on_ddp_ranks_is_that_of_one_process(ranks, name, clip):
    alone = run(0, 1, "plain", name, 40, clip)
    assert len({record.batch_size for record in alone[1]}) > 5
    for count, engine in ((2, "ddp"), (2, "ddp-static"), (4, "ddp")):
        answers = ranks(count)(run, engine, name, 40, clip)
        assert together([alone]) == together(answers)
        for _, records, weights in answers:
            for mine, theirs in zip(alone[1], records, strict=True):
                assert mine.batch_size == theirs.batch_size
                assert pytest.approx(mine.similarity, abs=1e-9) == theirs.similarity
            for mine, theirs in zip(alone[2], weights, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


# fully_shard: micro-batch j of all ranks is one observation


WEIGHT = {"samples": lambda number: 1.0, "tokens": lambda number: float(5 * (number % 4 != 1))}


def mean_loss(model, x, y, tokens):
    """The mean over the tokens, and how many they are."""
    total = tokens.sum().item()
    each = cross_entropy(model(x), y, reduction="none")
    return (each @ tokens / total if total else each.sum()), total


def sharded_run(rank, ranks, engine, name, weight, updates):
    train = build(rank, ranks, engine, name, virtual_ranks=ranks, lr_scaling=None)
    done = []
    for _ in train.epochs(10**9):
        for step in train:
            groups = []
            for x, y, number in step:
                tokens = torch.tensor([WEIGHT[weight](n) for n in number.tolist()]).double()
                loss, total = mean_loss(train.model, x, y, tokens)
                step.backward(loss, weight=None if weight == "samples" else total)
                groups.append(number.tolist())
            step.clip_grad_norm_(1.0)
            done.append((groups, step.update().micro_batches))
            if len(done) == updates:
                return done, [whole(p) for p in train.model.parameters()]
    raise AssertionError


def one_process(name, weight, steps):
    """The same groups, which one process sees one after the other."""
    model, data = network(), Numbered()
    optimizer = MAKE[name](model.parameters())
    source = PlainSource(model.parameters(), explicit=True)
    optimizer.follow(source)
    for groups in steps:
        of_group = [torch.tensor([WEIGHT[weight](n) for n in group]).double() for group in groups]
        total = sum(tokens.sum().item() for tokens in of_group)
        for group, tokens in zip(groups, of_group, strict=True):
            loss, n = mean_loss(model, data.x[group], data.y[group], tokens)
            if n:
                with source.micro_batch(n):
                    (loss * n / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


SHARDED = [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)]
ALWAYS = [("VRSGD", "fsdp2"), ("VRAdam", "fsdp2"), ("VRLAMB", "hsdp")]  # the others are slow


@pytest.mark.parametrize("weight", WEIGHT)
@pytest.mark.parametrize(
    ("name", "engine", "count"),
    [
        pytest.param(
            name, engine, count, marks=[] if (name, engine) in ALWAYS else [pytest.mark.slow]
        )
        for name in VR
        for engine, count in SHARDED
    ],
)
def test_a_loop_on_shards_is_that_of_one_process_with_its_groups(
    ranks, name, engine, count, weight
):
    answers = ranks(count)(sharded_run, engine, name, weight, 15)
    steps = [
        [[n for piece in together_ for n in piece] for together_ in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*([g for g, _ in done] for done, _ in answers), strict=True)
    ]
    assert all(micro_batches >= 8 * count for done, _ in answers for _, micro_batches in done)
    expected = one_process(name, weight, steps)
    for _, weights in answers:
        for mine, theirs in zip(expected, weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def too_few(rank, ranks):
    with pytest.raises(SettingError, match="min_micro_batches=3 on 2 ranks"):
        build(rank, ranks, "fsdp2", "VRSGD", 2, min_micro_batches=3)


def test_fewer_than_two_micro_batches_a_rank_are_refused_where_those_are_compared(ranks):
    ranks(2)(too_few)
