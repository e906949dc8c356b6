"""The sample ledger: one order for any number of ranks, every sample once, whatever happens."""

import random
import threading
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from bigbatch import Batches, BatchPlan, ElasticDistributedSampler
from bigbatch.data.rank_consistency import HostCollectives, samples_of_rank
from bigbatch.errors import SettingError
from property_tests import property_test
from tensors import through_a_file

often = property_test(120)
SEED = 11


class Threads:
    """Ranks that are threads of this process: what one says, all hear."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.said = [None] * ranks

    def rank(self, rank):
        return ThreadCollectives(self, rank)

    def run(self, function):
        """`function(agreement)` on every rank."""
        answers, errors = [None] * len(self.said), []

        def serve(rank):
            try:
                answers[rank] = function(self.rank(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(len(self.said))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return answers


class ThreadCollectives(HostCollectives):
    def __init__(self, together, rank):
        super().__init__()
        self.rank, self.ranks = self.process, self.processes = rank, len(together.said)
        self._together = together

    def all_gather(self, *values, subject=""):
        self._together.said[self.rank] = list(values)
        self._together.barrier.wait()
        rows = [list(row) for row in self._together.said]
        self._together.barrier.wait()
        return rows


def loader(samples, rank, ranks, size, **more):
    sampler = ElasticDistributedSampler(range(samples), seed=SEED, num_replicas=ranks, rank=rank)
    return DataLoader(range(samples), size, sampler=sampler, **more)


def order(samples, epoch=0):
    sampler = ElasticDistributedSampler(range(samples), seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def batches_in(micro_batches):
    return [batch.tolist() for batch, *_ in micro_batches]


def leg(
    samples,
    ranks,
    virtual,
    size,
    remainder,
    plans,
    first,
    stop,
    state,
    min_batch,
    max_batch,
    epoch=0,
):
    """Some steps of one pass on so many ranks: (steps of micro-batches by rank, state of each)."""

    def of_rank(collectives):
        batches = Batches(
            loader(samples, collectives.rank, ranks, size),
            remainder=remainder,
            virtual_ranks=virtual,
        )
        batches.share(collectives, lockstep=True)
        if state is None:
            batches.start(epoch)
        else:
            batches.load_state_dict(
                state[0], epoch, same_rank=state[1] == (collectives.rank, ranks)
            )
        steps = []
        while len(steps) < stop:
            plan = plans[(first + len(steps)) % len(plans)]
            micro_batches = batches.step(plan, min_batch, max_batch)
            if micro_batches is None:
                break
            steps.append(batches_in(micro_batches))
            assert micro_batches.samples < (max_batch or 10**9) + virtual
        return steps, through_a_file(batches.state_dict())

    return Threads(ranks).run(of_rank)


@st.composite
def runs(draw):
    virtual = draw(st.sampled_from([1, 2, 3, 4, 6]))
    counts = [n for n in range(1, virtual + 1) if virtual % n == 0]
    samples = draw(st.integers(virtual, 90))
    plans = [
        BatchPlan(virtual, draw(st.integers(1, 5)), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    legs = [
        (draw(st.sampled_from(counts)), draw(st.integers(1, 9)), draw(st.integers(0, 4)))
        for _ in range(draw(st.integers(0, 3)))
    ]
    legs.append((draw(st.sampled_from(counts)), draw(st.integers(1, 9)), 10**6))
    remainder = draw(st.sampled_from(["share", "step"]))
    min_batch = draw(st.integers(1, 12))
    largest = max(plan.batch_size for plan in plans)
    max_batch = draw(st.one_of(st.none(), st.integers(largest, largest + 20)))
    return samples, virtual, plans, legs, remainder, min_batch, max_batch


@often
@given(runs())
def test_every_sample_comes_once_in_the_ledgers_order_over_ranks_plans_and_restarts(drawn):
    samples, virtual, plans, legs, remainder, min_batch, max_batch = drawn
    steps, state = [], None
    for ranks, size, stop in legs:
        answers = leg(
            samples,
            ranks,
            virtual,
            size,
            remainder,
            plans,
            len(steps),
            stop,
            state,
            min_batch,
            max_batch,
        )
        by_rank = [answer[0] for answer in answers]
        assert len({tuple(len(step) for step in rank) for rank in by_rank}) == 1  # no rank waits
        steps += [list(chain.from_iterable(step)) for step in zip(*by_rank, strict=True)]
        rank = random.Random(len(steps)).randrange(ranks)
        state = answers[rank][1], (rank, ranks)
        if not state[0]["pass"]["open"]:
            break
    expected, at = order(samples), 0
    for step in steps:
        numbers = [n for chunk in step for n in chunk]
        assert sorted(expected[at : at + len(numbers)]) == sorted(numbers)
        at += len(numbers)
    assert samples == at


@often
@given(runs())
def test_the_groups_of_a_step_are_the_same_on_any_number_of_ranks(drawn):
    samples, virtual, plans, legs, remainder, min_batch, max_batch = drawn
    found = []
    for ranks in {1, virtual, *(count for count, _, _ in legs)}:
        answers = leg(
            samples, ranks, virtual, 5, remainder, plans, 0, 10**6, None, min_batch, max_batch
        )
        steps = zip(*(answer[0] for answer in answers), strict=True)
        found.append([sorted(chain.from_iterable(step)) for step in steps])
    assert all(found[0] == other for other in found)


@often
@given(runs())
def test_dropping_the_remainder_leaves_whole_steps_on_every_rank(drawn):
    samples, virtual, plans, legs, _, min_batch, _ = drawn
    ranks, size, _ = legs[-1]
    answers = leg(samples, ranks, virtual, size, "drop", plans, 0, 10**6, None, min_batch, None)
    steps = [list(chain.from_iterable(step)) for step in zip(*(a[0] for a in answers), strict=True)]
    sizes = [sum(map(len, step)) for step in steps]
    expected = [plans[index % len(plans)].batch_size for index in range(len(steps) + 1)]
    assert expected[:-1] == sizes
    assert samples - sum(sizes) < expected[-1]
    numbers = [n for step in steps for chunk in step for n in chunk]
    assert sorted(order(samples)[: sum(sizes)]) == sorted(numbers)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 1, 5, 10, 11])
def test_the_ranks_of_a_ledger_have_every_position_once_from_any_start(ranks, start):
    samplers = [
        ElasticDistributedSampler(range(11), seed=1, num_replicas=ranks, rank=r)
        for r in range(ranks)
    ]
    order = list(ElasticDistributedSampler(range(11), seed=1))
    assert order != sorted(order)
    for sampler in samplers:
        sampler.start_at(start)
    read = [list(sampler) for sampler in samplers]
    for position, number in enumerate(order[start:], start):
        assert number in read[position % ranks]
    assert sorted(order[start:]) == sorted(chain.from_iterable(read))
    assert [samples_of_rank(11, rank, ranks) for rank in range(ranks)] == [len(x) for x in samplers]


def test_orders_differ_by_seed_and_by_epoch():
    orders = []
    for seed in range(3):
        for epoch in range(3):
            sampler = ElasticDistributedSampler(range(50), seed=seed)
            sampler.set_epoch(epoch)
            orders.append(tuple(sampler))
    assert 9 == len(set(orders))
    assert list(range(5)) == list(ElasticDistributedSampler(range(5), shuffle=False))


def test_a_ledger_that_cannot_be_divided_is_refused():
    with pytest.raises(SettingError, match="rank=2 is none of num_replicas=2"):
        ElasticDistributedSampler(range(5), num_replicas=2, rank=2)
    with pytest.raises(SettingError, match="3 samples are too few for 4 ranks"):
        ElasticDistributedSampler(range(3), num_replicas=4, rank=0)
    with pytest.raises(SettingError, match="seed=-1"):
        ElasticDistributedSampler(range(3), seed=-1)


def test_virtual_ranks_are_a_multiple_of_the_ranks():
    def of_rank(collectives):
        batches = Batches(loader(20, collectives.rank, 2, 4), virtual_ranks=3)
        with pytest.raises(SettingError, match=r"virtual_ranks=3 is no multiple of the 2 ranks"):
            batches.share(collectives, lockstep=False)

    Threads(2).run(of_rank)
    with pytest.raises(SettingError, match="virtual_ranks=0"):
        Batches([torch.zeros(1)], virtual_ranks=0)


def test_batches_that_split_cuts_are_not_interleaved_to_virtual_ranks():
    batches = Batches(
        [torch.zeros(4)], virtual_ranks=2, split=lambda b, lo, hi: b[lo:hi], count=len
    )
    with pytest.raises(SettingError, match="split="):
        batches.share(HostCollectives(), lockstep=False)


def test_a_padding_sampler_is_said_once_with_its_number():
    def of_rank(collectives):
        sampler = DistributedSampler(range(10), num_replicas=4, rank=collectives.rank, seed=SEED)
        batches = Batches(DataLoader(range(10), 4, sampler=sampler))
        if collectives.rank:
            batches.share(collectives, lockstep=False)
            return
        with pytest.warns(UserWarning, match="repeats 2 samples in every epoch"):
            batches.share(collectives, lockstep=False)
        assert 12 == batches.samples

    Threads(4).run(of_rank)


def test_fewer_samples_than_virtual_ranks_join_the_last_step_on_any_number_of_ranks():
    for ranks in (1, 2, 4):
        answers = leg(27, ranks, 4, 4, "share", [BatchPlan(4, 1, 1)], 0, 99, None, 4, 4)
        steps = zip(*(answer[0] for answer in answers), strict=True)
        assert [4] * 5 + [7] == [sum(len(p) for rank in step for p in rank) for step in steps]


def test_a_users_own_set_epoch_after_a_resume_changes_nothing():
    def rest_of(batches, sampler, epoch):
        if epoch is not None:
            sampler.set_epoch(epoch)
        steps = []
        while micro_batches := batches.step(BatchPlan(1, 4, 2), min_batch=4):
            steps.append(batches_in(micro_batches))
        return steps

    expected = None
    for epoch in (None, 3):
        first = Batches(loader(48, 0, 1, 8))
        first.start(3)
        before = [batches_in(first.step(BatchPlan(1, 4, 2), min_batch=4)) for _ in range(2)]
        again = loader(48, 0, 1, 8)
        batches = Batches(again)
        batches.load_state_dict(through_a_file(first.state_dict()), 3)
        steps = before + rest_of(batches, again.sampler, epoch)
        assert sorted(range(48)) == sorted(n for step in steps for chunk in step for n in chunk)
        assert expected in (None, steps)
        expected = steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ledger_whose_last_batch_is_dropped_is_taken_up_on_other_ranks(ranks):
    def batches_of(collectives):
        batches = Batches(loader(320, collectives.rank, collectives.ranks, 16, drop_last=True))
        batches.share(collectives, lockstep=True)
        return batches

    def begun(collectives):
        batches = batches_of(collectives)
        batches.start(0)
        plan = BatchPlan(collectives.ranks, 20 // collectives.ranks, 2)
        return [batches_in(batches.step(plan, min_batch=4)) for _ in range(3)], batches.state_dict()

    def gone_on(collectives):
        batches = batches_of(collectives)
        batches.load_state_dict(answers[0][1], 0, same_rank=False)
        steps = []
        while micro_batches := batches.step(
            BatchPlan(collectives.ranks, 20 // collectives.ranks, 2), min_batch=4
        ):
            steps.append(batches_in(micro_batches))
        return steps

    answers = Threads(ranks).run(begun)
    parts = [step for steps, _ in answers for step in steps]
    for steps in Threads(3 - ranks).run(gone_on):
        parts += steps
    assert list(range(320)) == sorted(n for step in parts for chunk in step for n in chunk)


def test_a_padded_pass_continues_on_a_number_of_ranks_that_needs_no_padding():
    def of(ranks, rank):
        sampler = DistributedSampler(range(101), ranks, rank, shuffle=False)
        return Batches(DataLoader(range(101), 5, sampler=sampler))

    def of_rank(collectives):
        batches = of(2, collectives.rank)
        batches.share(collectives, lockstep=False)
        batches.start(0)
        for _ in batches.step(BatchPlan(2, 5, 2), min_batch=4):
            pass
        return batches.state_dict()

    with pytest.warns(UserWarning, match="repeats 1 samples"):
        state = Threads(2).run(of_rank)[0]
    alone = of(1, 0)
    alone.load_state_dict(state, 0, same_rank=False)
    seen = []
    while micro_batches := alone.step(BatchPlan(1, 5, 4), min_batch=4):
        seen += chain.from_iterable(batch.tolist() for batch, *_ in micro_batches)
    assert [*range(20, 101)] == seen
