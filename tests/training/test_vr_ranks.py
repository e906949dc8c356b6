"""AdaptiveBatch with variance-reduced optimizers on real ranks: the steps of one process."""

from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.gradients import SingleProcessSource
from numbered_samples import (
    SAMPLES,
    Numbered,
    ledger_loader,
    network,
    steps_of,
    together,
    whole,
    wrapped,
)
from optimizer_table import MAKE, VR
from single_steps import by_single_steps

pytestmark = [pytest.mark.filterwarnings("ignore:k = :UserWarning")]

IN_CI = ("VRAdam", "VRLARS")  # by elements and by layers; GSNR scaling has tests of its own
every_vr_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.release) for n in VR]
)


def build(rank, ranks, engine, name, virtual_ranks=4, **settings):
    model = wrapped(engine, ranks)
    optimizer = MAKE[name](model.parameters())
    batches = bb.Batches(ledger_loader(rank, ranks), virtual_ranks=virtual_ranks)
    settings = {
        "policy": bb.SimiGrad(target=0.3, min_batch=32, max_batch=300),
        "batch_size": 64,
        "micro_batch": 12,
    } | settings
    settings = by_single_steps({"every": 1, **settings})
    return bb.AdaptiveBatch(model, optimizer, batches, **settings)


def run(rank, ranks, engine, name, updates, clip=None):
    train = build(rank, ranks, engine, name)
    done = steps_of(train, 10**9, updates, clip)
    weights = [whole(p) for p in train.model.parameters()]
    return [numbers for numbers, _ in done], [record for _, record in done], weights


@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
@pytest.mark.parametrize(("engine", "count"), [("ddp", 2), ("ddp-static", 2), ("ddp", 4)])
@every_vr_optimizer
def test_a_loop_on_ddp_ranks_is_that_of_one_process(ranks, name, engine, count, clip):
    alone = run(0, 1, "plain", name, 40, clip)
    assert len({record.batch_size for record in alone[1]}) > 5
    answers = ranks(count)(run, engine, name, 40, clip)
    assert together([alone]) == together(answers)
    for _, records, weights in answers:
        for local, theirs in zip(alone[1], records, strict=True):
            assert local.batch_size == theirs.batch_size
            assert pytest.approx(local.similarity, abs=1e-9) == theirs.similarity
        torch.testing.assert_close(alone[2], weights, rtol=1e-8, atol=1e-10)


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


def one_process(name, weight, steps, samples=SAMPLES):
    """The same groups, which one process sees one after the other."""
    model, data = network(), Numbered(samples)
    optimizer = MAKE[name](model.parameters())
    source = SingleProcessSource(model.parameters(), explicit=True)
    optimizer.bind(source)
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


@pytest.mark.parametrize("weight", WEIGHT)
@pytest.mark.parametrize(("engine", "count"), [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)])
@every_vr_optimizer
def test_a_loop_on_shards_is_that_of_one_process_with_its_groups(
    ranks, name, engine, count, weight
):
    answers = ranks(count)(sharded_run, engine, name, weight, 15)
    steps = [
        [[n for chunk in together_ for n in chunk] for together_ in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*([g for g, _ in done] for done, _ in answers), strict=True)
    ]
    assert all(micro_batches >= 8 * count for done, _ in answers for _, micro_batches in done)
    expected = one_process(name, weight, steps)
    for _, weights in answers:
        torch.testing.assert_close(expected, weights, rtol=1e-8, atol=1e-10)


def too_few(rank, ranks):
    with pytest.raises(SettingError, match=r"min_micro_batches=3: .* on each of 2 ranks"):
        build(rank, ranks, "fsdp2", "VRSGD", 2, min_micro_batches=3)


def test_fewer_than_two_micro_batches_a_rank_are_refused_where_those_are_compared(ranks):
    ranks(2)(too_few)


# what else continues in a loop on ranks


def with_tokens(rank, ranks, engine, virtual_ranks, updates):
    """Losses over tokens, none on some samples; clipped; and the norms."""
    train = build(rank, ranks, engine, "VRAdam", virtual_ranks)
    norms, done = [], 0
    for _ in train.epochs(10**9):
        for step in train:
            for x, y, number in step:
                tokens = torch.tensor([WEIGHT["tokens"](n) for n in number.tolist()]).double()
                loss, total = mean_loss(train.model, x, y, tokens)
                step.backward(loss, weight=total)
            norms.append(float(step.clip_grad_norm_(0.2)))
            step.update()
            done += 1
            if done == updates:
                return norms, [whole(p) for p in train.model.parameters()]
    raise AssertionError


def test_losses_over_tokens_are_clipped_by_their_true_norm(ranks):
    norms, weights = with_tokens(0, 1, "plain", 4, 12)
    for seen, other in ranks(2)(with_tokens, "ddp", 4, 12):
        assert pytest.approx(norms, rel=1e-9) == seen
        torch.testing.assert_close(weights, other, rtol=1e-8, atol=1e-10)


def one_backward_a_rank(rank, ranks, engine):
    train = build(
        rank, ranks, engine, "VRAdam", 2, policy=bb.Fixed(24), batch_size=24, min_micro_batches=2
    )
    for number, step in enumerate(train):
        for x, y, _ in step:
            step.backward(cross_entropy(train.model(x), y))
        assert 2 == step.update().micro_batches
        if number == 5:
            return [whole(p) for p in train.model.parameters()]
    raise AssertionError


def test_a_static_graph_may_have_one_micro_batch_a_rank(ranks):
    expected = one_backward_a_rank(0, 1, "plain")
    for weights in ranks(2)(one_backward_a_rank, "ddp-static"):
        torch.testing.assert_close(expected, weights, rtol=1e-8, atol=1e-10)


def skipping(rank, ranks, engine):
    """Four steps, of which the second is not finite on rank 1."""
    train = build(rank, ranks, engine, "VRAdam", ranks, policy=bb.Fixed(64))
    records = []
    for number, step in enumerate(train):
        for x, y, _ in step:
            loss = cross_entropy(train.model(x), y)
            step.backward(loss * torch.nan if number == 1 and rank == 1 else loss)
        records.append(step.update())
        if number == 3:
            return [r.skipped for r in records], [whole(p) for p in train.model.parameters()]
    raise AssertionError


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_that_is_not_finite_is_left_out_and_the_next_is_whole(ranks, engine):
    results = ranks(2)(skipping, engine)
    for skipped, weights in results:
        assert [False, True, False, False] == skipped
        assert all(w.isfinite().all() for w in weights)
        assert all(map(torch.equal, weights, results[0][1]))


def two_each(rank, ranks):
    """Two virtual ranks on each of two, over 99 samples, the last row of which is not full."""
    model = wrapped("fsdp2", ranks)
    train = bb.AdaptiveBatch(
        model,
        MAKE["VRSGD"](model.parameters()),
        bb.Batches(ledger_loader(rank, ranks, samples=99), virtual_ranks=4),
        policy=bb.Fixed(48),
        micro_batch=12,
        lr_scaling=None,
        min_micro_batches=4,
        every=1,
    )
    done = []
    for _ in train.epochs(2):
        for step in train:
            groups = []
            for x, y, number in step:
                step.backward(cross_entropy(train.model(x), y))
                groups.append(number.tolist())
            step.clip_grad_norm_(1.0)
            done.append(groups)
            step.update()
    return done, [whole(p) for p in train.model.parameters()]


def test_micro_batches_of_virtual_ranks_are_weighed_over_all_ranks(ranks):
    answers = ranks(2)(two_each)
    steps = [
        [[n for chunk in together_ for n in chunk] for together_ in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*(done for done, _ in answers), strict=True)
    ]
    assert {99} == {sum(map(len, chain(*epoch))) for epoch in (steps[:2], steps[2:])}
    expected = one_process("VRSGD", "samples", steps, 99)
    for _, weights in answers:
        torch.testing.assert_close(expected, weights, rtol=1e-8, atol=1e-10)


def weights_on_one_rank(rank, ranks):
    train = build(rank, ranks, "fsdp2", "VRSGD", 2)
    step = next(iter(train))
    x, y, _ = next(iter(step))
    loss = cross_entropy(train.model(x), y)
    with pytest.raises(LoopError, match="always or never"):
        step.backward(loss, weight=None if rank else 3.0)


def test_weights_on_one_rank_only_are_refused_on_both(ranks):
    ranks(2)(weights_on_one_rank)


def ending(rank, ranks, engine, samples):
    model = wrapped(engine, ranks)
    optimizer = MAKE["VRSGD"](model.parameters())
    loader = bb.Batches(ledger_loader(rank, ranks, samples=samples), remainder="step")
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed(48), micro_batch=12, every=1)
    sizes = []
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(model(x), y))
        sizes.append(step.update().batch_size)
    return sizes


def test_a_remainder_of_its_own_has_two_micro_batches(ranks):
    assert [48, 49] == ending(0, 1, "plain", 97)
    assert [48, 48, 2] == ending(0, 1, "plain", 98)
    for samples in (98, 99):
        sizes = ranks(2)(ending, "fsdp2", samples)
        assert [[48, samples - 48]] * 2 == sizes


def attached_elsewhere(rank, ranks):
    model, other = wrapped("ddp", ranks), wrapped("ddp", ranks)
    optimizer = MAKE["VRSGD"](model.parameters())
    optimizer.attach(model)
    optimizer.param_groups[0]["params"] = list(other.parameters())
    with pytest.raises(SettingError, match="attached to another DDP model"):
        bb.AdaptiveBatch(other, optimizer, ledger_loader(rank, ranks), policy=bb.Fixed(48), every=1)


def test_an_optimizer_that_is_attached_elsewhere_is_refused(ranks):
    ranks(2)(attached_elsewhere)


def fitting(rank, ranks):
    model = wrapped("ddp", ranks)
    optimizer = MAKE["VRAdam"](model.parameters())
    optimizer.attach(model)
    before = [whole(p) for p in model.parameters()]

    def loss_of(batch):
        x, y, _ = batch
        return cross_entropy(model(x), y)

    largest = bb.largest_micro_batch(model, optimizer, ledger_loader(rank, ranks), loss_of, most=32)
    assert all(map(torch.equal, before, [whole(p) for p in model.parameters()]))
    return largest


def test_the_largest_micro_batch_is_found_for_an_attached_optimizer(ranks):
    assert [32, 32] == ranks(2)(fitting)
