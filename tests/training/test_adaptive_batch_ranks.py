"""AdaptiveBatch on real ranks: the same samples, decisions and weights on any number of them."""

import itertools
import os
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import bigbatch as bb
from bigbatch.errors import BatchError, GradientError, LoopError, RankError
from numbered_samples import (
    SAMPLES,
    SEED,
    Numbered,
    Shard,
    build,
    ledger_loader,
    network,
    run,
    steps_of,
    together,
    whole,
    wrapped,
)
from ranks import RankError as LostError


def groups(answers):
    return [
        sorted(sorted(chunk) for numbers in step for chunk in numbers)
        for step in zip(*(answer[0] for answer in answers), strict=True)
    ]


@pytest.mark.parametrize("virtual_ranks", [4, 8])
@pytest.mark.parametrize(("engine", "count"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("ddp", 4)])
def test_the_run_is_the_same_on_one_two_and_four_ranks(ranks, engine, count, virtual_ranks):
    updates = 60
    alone = run(0, 1, "plain", virtual_ranks, updates)
    trajectory = [record.batch_size for record in alone[1]]
    assert len(set(trajectory)) > 15
    answers = ranks(count)(run, engine, virtual_ranks, updates)
    assert groups([alone]) == groups(answers)
    for _, records, weights in answers:
        assert trajectory == [record.batch_size for record in records]
        assert [r.decision for r in alone[1]] == [r.decision for r in records]
        for local, theirs in zip(alone[1], records, strict=True):
            assert pytest.approx(local.loss, rel=1e-9) == theirs.loss
            assert pytest.approx(local.similarity, abs=1e-9) == theirs.similarity
        torch.testing.assert_close(alone[2], weights, rtol=1e-8, atol=1e-10)


def drawn(rank, ranks, updates, state=None):
    """Batches that a function draws on each rank: sizes, the draws, and the state at the end."""
    data, draws = Numbered(), []

    def draw():
        draws.append(torch.randint(SAMPLES, (16,)))
        return data.x[draws[-1]], data.y[draws[-1]], draws[-1]

    train = build(rank, ranks, "plain" if ranks == 1 else "ddp", 4, loader=draw)
    torch.manual_seed(100 + rank)
    if state is not None:
        train.load_state_dict(state)
    done = steps_of(train, 1, updates)
    return [record.batch_size for _, record in done], torch.stack(draws), train.state_dict()


def test_ranks_draw_their_own_batches_no_further_than_one_ahead_and_resume_on_fewer(ranks):
    answers = ranks(2)(drawn, 30)
    (sizes, first, state), (other_sizes, second, _) = answers
    assert sizes == other_sizes
    assert len(set(sizes)) > 5
    assert not torch.equal(first, second)
    for draws in (first, second):  # each has half of the samples
        assert 0 < 16 * len(draws) - sum(sizes) / 2 <= 16 + 4
    with pytest.warns(UserWarning, match="random states are not those of these 1 ranks"):
        _, alone, after = drawn(0, 1, 35, state)
    assert sum(sizes) < after["shared"]["counts"][1]
    assert 16 * len(alone) <= after["shared"]["counts"][1] - sum(sizes) + 16  # none drawn again


# the gradient


def handed_over(rank, ranks, engine, weigh, micro):
    """The gradient of one step over all samples, as the optimizer saw it."""
    train = build(
        rank,
        ranks,
        engine,
        None,
        ledger_loader(rank, ranks, 23),
        micro_batch=micro,
        policy=bb.SimiGrad(min_batch=12),
        batch_size=18,
    )
    seen = []
    train.optimizer.register_step_pre_hook(
        lambda *_: seen.append([whole(p.grad) for p in train.model.parameters()])
    )
    for step in train:
        for x, y, number in step:
            if weigh is None:
                step.backward(cross_entropy(train.model(x), y))
                continue
            tokens = torch.tensor([weigh[n] for n in number.tolist()], dtype=torch.float64)
            total = tokens.sum().item()
            logits = train.model(x)
            mean = cross_entropy(logits, torch.full_like(y, -100))  # of nothing: nan
            if total:
                mean = cross_entropy(logits, y, reduction="none") @ tokens / total
            step.backward(mean, weight=total)
        record = step.update()
    return seen, record


TOKENS = {
    "samples": None,
    "tokens": [1 + n % 7 for n in range(23)],
    "tokens, none on most samples": [5 * (n in (3, 4)) for n in range(23)],
}


@pytest.mark.parametrize("engine", ["ddp", "ddp-static", "fsdp2"])
@pytest.mark.parametrize("weights", TOKENS)
@pytest.mark.parametrize("count", [2, 3])
def test_the_optimizer_sees_the_mean_over_all_ranks(ranks, engine, weights, count):
    data, model, weigh = Numbered(23), network(), TOKENS[weights]
    each = cross_entropy(model(data.x), data.y, reduction="none")
    tokens = torch.tensor([1.0] * 23 if weigh is None else weigh, dtype=torch.float64)
    loss = (each * tokens).sum() / tokens.sum()
    loss.backward()
    for seen, record in ranks(count)(handed_over, engine, weigh, 4):
        assert 23 == record.batch_size == record.samples
        assert 1 == len(seen)
        assert pytest.approx(loss.item(), rel=1e-12) == record.loss
        for expected, gradient in zip(model.parameters(), seen[0], strict=True):
            torch.testing.assert_close(expected.grad, gradient, rtol=1e-10, atol=1e-14)


def with_an_empty_rank(rank, ranks, engine):
    """Four steps; in the third, the micro-batches of the first virtual rank have no tokens."""
    model = wrapped(engine, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        bb.Batches(ledger_loader(rank, ranks), virtual_ranks=2),
        policy=bb.Fixed(64),
        micro_batch=8,
        meter=bb.GradientMeter(model, confidence=0.9),
        every=1,
    )
    order = list(bb.ElasticDistributedSampler(range(SAMPLES), seed=SEED, num_replicas=1, rank=0))
    empty = {number for i, number in enumerate(order[128:192]) if i % 2 == 0}
    records = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in train:
            for x, y, numbers in step:
                kept = torch.tensor([n not in empty for n in numbers.tolist()])
                y = torch.where(kept, y, -100)
                step.backward(cross_entropy(train.model(x), y), weight=int(kept.sum()))
            records.append(step.update())
            if len(records) == 4:
                break
    messages = [str(w.message) for w in caught]
    return records, [whole(p) for p in train.model.parameters()], messages


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_without_tokens_in_a_step_adds_nothing_to_it(ranks, engine):
    alone, weights, _ = with_an_empty_rank(0, 1, "plain")
    assert 4 == alone[2].statistics.micro_batches
    for records, other, messages in ranks(2)(with_an_empty_rank, engine):
        assert not any("median" in each for each in messages)
        for one, two in zip(alone, records, strict=True):
            assert (
                pytest.approx(one.statistics.grad_variance, rel=1e-9)
                == two.statistics.grad_variance
            )
            assert pytest.approx(one.similarity, rel=1e-9) == two.similarity
            expected = one.statistics.similarity_interval
            assert pytest.approx(expected, rel=1e-6) == two.statistics.similarity_interval
        torch.testing.assert_close(weights, other, rtol=1e-9, atol=1e-12)


def with_an_idle_rank_in_bfloat16(rank, ranks, backwards):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(torch.bfloat16)
    model = DistributedDataParallel(model)
    train = bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        DataLoader((torch.randn(backwards, 6) + 1).to(torch.bfloat16), batch_size=1),
        policy=bb.Fixed(2 * backwards),
        micro_batch=1,
        every=1,
    )
    step = next(iter(train))
    for x in step:
        label = torch.full((len(x),), -100 if rank else 0)
        step.backward(cross_entropy(model(x).float(), label))
    return step.update().statistics


def test_a_rank_without_labels_allows_what_the_others_types_round(ranks):
    first, second = ranks(2)(with_an_idle_rank_in_bfloat16, 256)
    assert first == second
    assert first.micro_batches == 256


def clipped(rank, ranks, engine):
    train = build(rank, ranks, engine, 4)
    norms = []
    for step in train:
        for x, y, _ in step:
            step.backward(cross_entropy(train.model(x), y))
        norms.append(float(whole(step.clip_grad_norm_(0.1))))
        step.update()
        if len(norms) == 5:
            return norms, [whole(p) for p in train.model.parameters()]
    return None


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_clipping_is_that_of_the_mean_over_all_ranks(ranks, engine):
    norms, weights = clipped(0, 1, "plain")
    assert min(norms) > 0.1
    for theirs, other in ranks(2)(clipped, engine):
        assert pytest.approx(norms, rel=1e-9) == theirs
        torch.testing.assert_close(weights, other, rtol=1e-9, atol=1e-12)


# what goes wrong on one rank


def fed_the_same(rank, ranks):
    train = build(rank, ranks, "ddp", None, DataLoader(Numbered(), 16))
    with warnings.catch_warnings(record=True, action="always") as caught:
        steps_of(train, 1, 12)
    return [str(w.message) for w in caught]


def test_ranks_that_are_fed_the_same_data_are_warned_of_the_missing_sampler(ranks):
    first, second = ranks(2)(fed_the_same)
    assert 1 == sum("DistributedSampler" in messages for messages in first)
    assert [] == second


def padded(rank, ranks, engine):
    """Batches of other widths cannot be glued, and a step spans two of them."""
    draw = torch.Generator().manual_seed(rank)
    loader = [
        (torch.randn(6, 3 + i % 2, 5, generator=draw).double(), torch.randint(3, (6,)), i)
        for i in range(10)
    ]
    batches = bb.Batches([(x.flatten(2), y) for x, y, _ in loader])
    train = build(
        rank, ranks, engine, None, batches, policy=bb.Fixed(16), batch_size=16, micro_batch=4
    )
    read = 0
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(train.model(x).mean(1), y))
            read += len(x)
        step.update()
    return read


def test_batches_that_cannot_be_glued_train_under_ddp_and_are_refused_under_fsdp2(ranks):
    assert [60, 60] == ranks(2)(padded, "ddp")
    for message in ranks(2)(refusal_of_padded):
        assert "pad them to one length in the collate function" in message


def refusal_of_padded(rank, ranks):
    with pytest.raises(bb.BigbatchError) as caught:
        padded(rank, ranks, "fsdp2")
    return str(caught.value)


def with_a_bad_sample(rank, ranks, engine):
    loader = ledger_loader(rank, ranks)
    train = build(rank, ranks, engine, None, loader)
    with warnings.catch_warnings(record=True, action="always"):
        records, weights = [], []
        for step in train:
            for x, y, _ in step:
                bad = rank == ranks - 1 and len(records) == 2
                step.backward(cross_entropy(train.model(x), y) * (torch.nan if bad else 1.0))
            records.append(step.update())
            weights.append([whole(p) for p in train.model.parameters()])
            if len(records) == 5:
                break
    return records, weights


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks, engine):
    for records, weights in ranks(2)(with_a_bad_sample, engine):
        assert [False, False, True, False, False] == [record.skipped for record in records]
        same = [all(map(torch.equal, one, two)) for one, two in itertools.pairwise(weights)]
        assert [False, True, False, False] == same
        assert "skipped" in records[2].decision.reason


class Moody:
    """A policy that is no function of (statistics, now): rank 1 decides otherwise after a while."""

    def __init__(self, rank):
        self.rank, self.asked = rank, 0

    def decide(self, noise, now):
        self.asked += 1
        return bb.Decision(64 + 8 * (self.rank == 1 and self.asked == 3), "moody")


def disagreeing(rank, ranks, engine):
    train = build(rank, ranks, engine, None, policy=Moody(rank), min_micro_batches=8)
    done = 0
    try:
        for step in train:
            for x, y, _ in step:
                step.backward(cross_entropy(train.model(x), y))
            step.update()
            done += 1
    except RankError as error:
        return done, str(error)
    return done, ""


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_that_disagree_raise_on_every_rank(ranks, engine):
    for done, message in ranks(2)(disagreeing, engine):
        assert 3 == done
        assert (
            "rank 1 disagrees with rank 0 on what decides a step: controller.target_batch_size"
            in message
        )
        assert "controller.target_batch_size is 72 there and 64 on rank 0" in message
        assert "(statistics, now) alone" in message


def added_up(rank, ranks):
    train = build(rank, ranks, "fsdp2", None)
    train.model.set_gradient_divide_factor(1.0)
    train.model[0].set_gradient_divide_factor(1.0)
    for part in (train.model, train.model[0]):
        part.set_force_sum_reduction_for_comms(True)
    with pytest.raises(GradientError, match="added up and not averaged"):
        steps_of(train, 1, 1)


def weighed_on_one(rank, ranks):
    train = build(rank, ranks, "ddp", None)
    step = next(iter(train))
    for x, y, _ in step:
        step.backward(cross_entropy(train.model(x), y), weight=None if rank else len(x))
    with pytest.raises(LoopError, match="or on some ranks, and not for others"):
        step.update()


def with_an_order_of_its_own(rank, ranks):
    sampler = bb.ElasticDistributedSampler(range(SAMPLES), seed=rank)
    with pytest.raises(RankError, match="on their settings"):
        build(rank, ranks, "ddp", None, DataLoader(Numbered(), 16, sampler=sampler))


def gone_on_elsewhere(rank, ranks):
    train = build(rank, ranks, "ddp", None)
    state = train.state_dict()
    state["shared"]["counts"][1] += rank  # another state on each rank
    train.load_state_dict(state)
    with pytest.raises(RankError, match="where the run stands"):
        next(iter(train))


def between_micro_batches(rank, ranks):
    """On steps that are not measured, too."""
    for every in (1, 3):
        for disturb in ("backward", "zero_grad"):
            model = wrapped("ddp", ranks)
            train = bb.AdaptiveBatch(
                model,
                torch.optim.SGD(model.parameters(), lr=0.05),
                ledger_loader(rank, ranks),
                policy=bb.Fixed(32),
                micro_batch=4,
                every=every,
            )
            steps = iter(train)
            if every > 1:
                step = next(steps)
                for x, y, _ in step:
                    step.backward(cross_entropy(train.model(x), y))
                step.update()
            with pytest.raises(GradientError):
                disturbed(train, next(steps), disturb)


def disturbed(train, step, kind):
    for x, y, _ in step:
        step.backward(cross_entropy(train.model(x), y))
        if kind == "backward":
            train.model.module(x).square().mean().backward()
        else:
            train.model.zero_grad()
    step.update()


def of_another_width_at_the_end(rank, ranks, file):
    draw = torch.Generator().manual_seed(rank)

    class Stream:
        def __iter__(self):
            for i in range(3):
                width = 3 + (rank == 1 and i == 2)
                x = torch.randn(5, width, 5, generator=draw).double()
                yield x, torch.randint(3, (5,))

    settings = {"policy": bb.Fixed(24), "batch_size": 24, "micro_batch": 12}
    train = build(rank, ranks, "fsdp2", None, Stream(), **settings)
    try:
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(train.model(x).mean(1), y))
            step.update()
    except BatchError as error:
        file.write_text(str(error))
    finally:
        os._exit(0)  # so that the other rank does not wait for this one


def test_a_stream_whose_last_batch_cannot_be_glued_is_refused_under_fsdp2(ranks, tmp_path):
    file = tmp_path / "said"
    with pytest.raises(LostError, match="died"):
        ranks(2)(of_another_width_at_the_end, file)
    assert "pad them to one length" in file.read_text()


@pytest.mark.parametrize(
    "mistake",
    [added_up, weighed_on_one, with_an_order_of_its_own, gone_on_elsewhere, between_micro_batches],
)
def test_what_would_step_by_another_gradient_raises_on_every_rank(ranks, mistake):
    ranks(2)(mistake)


def settled_otherwise(rank, ranks):
    other = "rank 1 disagrees with rank 0 on their settings: "
    both = (
        r"controller\.settings\.policy is SimiGrad\(target=0\.3.* there and SimiGrad\(target=0\.2"
    )
    with pytest.raises(RankError, match=other + both):
        build(rank, ranks, "ddp", None, policy=bb.SimiGrad(target=0.3 if rank else 0.2))
    with pytest.raises(RankError, match=other + "micro_batch is 12 there and 13 on rank 0"):
        build(rank, ranks, "ddp", None, micro_batch=12 if rank else 13)


def test_ranks_with_other_settings_raise_at_construction(ranks):
    ranks(2)(settled_otherwise)


# streams


SHARDS = (100, 60, 31)


def streamed(rank, ranks, engine):
    batches = bb.Batches(DataLoader(Shard(SHARDS[rank]), 8))
    train = build(rank, ranks, engine, None, batches, policy=bb.Fixed(36), batch_size=36)
    with warnings.catch_warnings(record=True, action="always") as caught:
        done = steps_of(train, 2)
    read = [n for numbers, _ in done for chunk in numbers for n in chunk]
    messages = [str(w.message) for w in caught if "unread" in str(w.message)]
    return read, messages, [record.batch_size for _, record in done]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_shards_of_unequal_length_stop_together_and_say_what_stayed_unread(ranks, engine):
    answers = ranks(3)(streamed, engine)
    for rank, (read, messages, sizes) in enumerate(answers):
        assert 2 * list(range(31)) == read
        assert 2 * 3 * 31 == sum(sizes)
        assert (rank == 0) == bool(messages)
    assert 1 == len(answers[0][1])
    assert "[17, 17, 0] of them (at least) stay unread" in answers[0][1][0]


def without_a_sampler(rank, ranks):
    data = Numbered(40 + rank)  # says its length, and is not what others have
    with pytest.warns(UserWarning, match="unequally") if rank == 0 else warnings.catch_warnings():
        train = build(
            rank, ranks, "ddp", None, DataLoader(data, 8), policy=bb.Fixed(24), batch_size=24
        )
    return [record.batch_size for _, record in steps_of(train, 1)]


def test_known_lengths_that_differ_by_more_than_a_deal_stop_together_too(ranks):
    for sizes in ranks(3)(without_a_sampler):
        assert 120 == sum(sizes)


# restarts


def leg(rank, ranks, engine, states, updates, kind):
    train = build(rank, ranks, engine, 4, loaders()[kind](rank, ranks))
    if states is not None:
        weights, momentum, state = states[min(rank, len(states) - 1)]
        with torch.no_grad():
            for p, saved in zip(train.model.parameters(), weights, strict=True):
                share = distribute(saved, p)
                p.copy_(share)
                train.optimizer.state[p]["momentum_buffer"] = distribute(
                    momentum[saved_index(train, p)], p
                )
        with warnings.catch_warnings(action="ignore"):
            train.load_state_dict(state)
    done = steps_of(train, 10**9, updates)
    parameters = list(train.model.parameters())
    momentum = [whole(train.optimizer.state[p]["momentum_buffer"]) for p in parameters]
    return done, [whole(p) for p in parameters], momentum, train.state_dict()


def saved_index(train, parameter):
    return next(i for i, p in enumerate(train.model.parameters()) if p is parameter)


def distribute(saved, parameter):
    if isinstance(parameter, DTensor):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(saved, mesh, placements, src_data_rank=None)
    return saved.clone()


def with_a_distributed_sampler(rank, ranks):
    data = Numbered(1000)
    sampler = DistributedSampler(data, ranks, rank, seed=SEED)
    return DataLoader(data, 16, sampler=sampler)


def loaders():
    return {"ledger": ledger_loader, "DistributedSampler": with_a_distributed_sampler}


@pytest.mark.parametrize("kind", ["ledger", "DistributedSampler"])
def test_a_restart_on_another_number_of_ranks_continues_with_the_same_samples(ranks, kind):
    whole_run = leg(0, 1, "plain", None, 60, kind)
    expected = together([([numbers for numbers, _ in whole_run[0]],)])
    answers, states = None, None
    done, records = [], []
    for engine, count, updates in [
        ("ddp", 2, 13),
        ("plain", 1, 20),
        ("fsdp2", 2, 9),
        ("ddp", 4, 18),
    ]:
        if engine == "plain":
            answers = [leg(0, 1, engine, states, updates, kind)]
        else:
            answers = ranks(count)(leg, engine, states, updates, kind)
        done += together([([numbers for numbers, _ in answer[0]],) for answer in answers])
        records += [record for _, record in answers[0][0]]
        states = [(answer[1], answer[2], answer[3]) for answer in answers]
    assert expected == done
    assert [r.batch_size for _, r in whole_run[0]] == [r.batch_size for r in records]
    torch.testing.assert_close(whole_run[1], answers[0][1], rtol=1e-8, atol=1e-10)


def another_order(rank, ranks, state):
    train = build(rank, ranks, "ddp", 4)
    with warnings.catch_warnings(record=True, action="always") as caught:
        train.load_state_dict(state)
    return " ".join(str(w.message) for w in caught)


def test_a_restart_whose_order_is_another_says_so(ranks):
    alone = build(0, 1, "plain", 4, DataLoader(Numbered(), 16, shuffle=True))
    steps_of(alone, 1, 3)
    for messages in ranks(2)(another_order, alone.state_dict()):
        assert (
            "the order of this pass was RandomSampler and is ElasticDistributedSampler" in messages
        )
    (messages, _) = ranks(2)(another_order, build(0, 1, "plain", 4).state_dict())
    assert "that of rank 0 of 1" in messages
    assert "the order of this pass" not in messages


def with_the_state_of_another(rank, ranks, states):
    train = build(rank, ranks, "ddp", None)
    with warnings.catch_warnings(record=True, action="always") as caught:
        train.load_state_dict(states[0])
    return [str(w.message) for w in caught]


def saved(rank, ranks):
    train = build(rank, ranks, "ddp", None)
    steps_of(train, 1, 3)
    return train.state_dict()


def test_one_ranks_state_on_all_of_them_is_said_once(ranks):
    states = ranks(2)(saved)
    messages = ranks(2)(with_the_state_of_another, states)
    assert 1 == sum("that of rank 0 of 2" in each for one in messages for each in one)


def counted(rank, ranks):
    reductions = []
    train = build(rank, ranks, "ddp", 8)
    train.model.register_comm_hook(reductions, note)
    done = steps_of(train, 1)
    return len(reductions), len(done), sum(len(numbers) for numbers, _ in done)


def note(
    reductions: list, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    reductions.append(bucket.index())
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    work = torch.distributed.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_gradients_are_reduced_once_an_update_and_not_in_every_backward(ranks):
    for reductions, updates, backwards in ranks(2)(counted):
        assert updates == reductions
        assert backwards >= 4 * updates


def losses_and_seconds(rank, ranks, every):
    """Records of steps in which one rank has losses of both infinite signs."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(torch.randn(48, 4), batch_size=4)
    options = {"policy": bb.Fixed(8 * ranks), "micro_batch": 4, "min_micro_batches": 2 * ranks}
    train, records = bb.AdaptiveBatch(model, optimizer, batches, every=every, **options), []
    for number, step in enumerate(train):
        for signed, x in enumerate(step):
            loss = model(x).square().mean()
            infinite = rank == number == 1
            step.backward(loss + (-1) ** signed * torch.inf if infinite else loss)
        records.append(step.update())
    return [(r.loss, r.elapsed_seconds, r.skipped) for r in records]


@pytest.mark.parametrize("every", [0, 1])
def test_losses_of_both_infinite_signs_and_seconds_are_the_same_on_all_ranks(ranks, every):
    first, second = ranks(2)(losses_and_seconds, every)
    assert repr(first) == repr(second)
    losses = [loss for loss, *_ in first]
    assert [n for n, loss in enumerate(losses) if loss != loss] == [1]
    seconds = [seconds for _, seconds, _ in first]
    assert sorted(seconds) == seconds
