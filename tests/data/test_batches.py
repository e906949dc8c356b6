"""Re-cutting a loader: each sample once, in order, whatever the plans and restarts."""

import itertools
import random
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import bigbatch as bb
from bigbatch import Batches, BatchPlan
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import BatchError, LoopError, SettingError, StateError
from property_tests import property_test
from tensors import through_a_file

torch.set_num_threads(1)
SEED = 20
often = property_test(150)

Steps = list[list[list[int]]]  # steps of micro-batches of sample numbers


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class Again:
    """A loader of one's own: no length, no batch size, a fresh generator every epoch."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches


def ragged(sizes: list[int]) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(sizes))


def one_pass(
    batches: Batches,
    plans: list[BatchPlan],
    *,
    min_batch: int = 1,
    max_batch: int | None = None,
    epoch: int = 0,
    read: Callable[[Any], list[int]] = Tensor.tolist,
) -> Steps:
    """A whole epoch; step i follows plan i, and from the first one again when they are used up."""
    batches.start(epoch)
    return list(rest_of_pass(batches, plans, min_batch=min_batch, max_batch=max_batch, read=read))


def rest_of_pass(
    batches: Batches,
    plans: list[BatchPlan],
    *,
    first: int = 0,
    min_batch: int = 1,
    max_batch: int | None = None,
    read: Callable[[Any], list[int]] = Tensor.tolist,
) -> Iterator[list[list[int]]]:
    while batches.open and (
        micro_batches := batches.step(plans[first % len(plans)], min_batch, max_batch)
    ):
        chunks = list(micro_batches)
        read_chunks = [read(chunk) for chunk, *_ in chunks]
        assert [len(chunk) for chunk in read_chunks] == [samples for _, samples, _ in chunks]
        yield read_chunks
        first += 1


def flat(steps: Steps) -> list[int]:
    return [number for step in steps for chunk in step for number in chunk]


def sizes(steps: Steps) -> list[int]:
    return [sum(len(chunk) for chunk in step) for step in steps]


some_plans = st.lists(
    st.builds(BatchPlan, st.just(1), micro=st.integers(1, 7), accumulation=st.integers(1, 5)),
    min_size=1,
    max_size=6,
)


@st.composite
def loaders(draw: st.DrawFn) -> Callable[[], Any]:
    """Any kind of loader, as a function that makes a new one."""
    n, size = draw(st.integers(1, 70)), draw(st.integers(1, 12))
    own_sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    order = draw(st.permutations(range(min(n, 12))))
    groups = [
        list(samples_of_rank)
        for samples_of_rank in numpy.array_split(order, draw(st.integers(1, 5)))
    ]
    groups = [[int(i) for i in group] for group in groups if len(group)]
    return draw(
        st.sampled_from(
            [
                lambda: ragged(own_sizes),
                lambda: Again(ragged(own_sizes)),
                lambda: DataLoader(range(n), size),
                lambda: DataLoader(range(n), size, drop_last=True),
                lambda: DataLoader(range(n), size, shuffle=True),
                lambda: DataLoader(range(n), size, shuffle=True, drop_last=True),
                lambda: DataLoader(range(n), size, shuffle=True, generator=seeded()),
                lambda: DataLoader(range(n), batch_sampler=groups),
                lambda: DataLoader(Stream(n), size),
                lambda: DataLoader(Stream(n), size, drop_last=True),
            ]
        )
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 1)


def own_order(make: Callable[[], Any]) -> list[int]:
    torch.manual_seed(SEED)
    return [number for batch in make() for number in batch.tolist()]


# each sample once


@often
@given(make=loaders(), plans=some_plans, remainder=st.sampled_from(["share", "step"]))
def test_every_sample_comes_once_and_in_the_loaders_order(make, plans, remainder):
    expected = own_order(make)
    torch.manual_seed(SEED)
    assert expected == flat(one_pass(Batches(make(), remainder=remainder), plans))


@often
@given(make=loaders(), plans=some_plans)
def test_a_second_epoch_is_complete_too(make, plans):
    batches = Batches(make())
    torch.manual_seed(SEED)
    first, second = one_pass(batches, plans), one_pass(batches, plans, epoch=1)
    # others where a loader shuffles and drops its last batch
    assert len(flat(first)) == len(flat(second)) == len(set(flat(second)))
    assert not batches.open


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_two_workers_lose_and_repeat_nothing(shuffle, drop_last):
    def make() -> DataLoader:
        return DataLoader(range(50), 8, shuffle=shuffle, drop_last=drop_last, num_workers=2)

    expected = own_order(make)
    torch.manual_seed(SEED)
    plans = [BatchPlan(1, 3, 2), BatchPlan(1, 5, 3), BatchPlan(1, 1, 1)]
    assert expected == flat(one_pass(Batches(make()), plans))


def test_empty_batches_of_a_loader_are_passed_over():
    loader = [torch.arange(0), torch.arange(3), torch.arange(0), torch.arange(3, 5)]
    assert [[[0, 1], [2, 3]], [[4]]] == one_pass(Batches(loader), [BatchPlan(1, 2, 2)])


def test_the_loader_is_not_read_to_the_end_of_a_large_step_before_it_begins():
    read: list[int] = []

    class Counted(Stream):
        def __iter__(self) -> Iterator[int]:
            for number in range(self.samples):
                read.append(number)
                yield number

    batches = Batches(DataLoader(Counted(1000), 1))
    batches.start(0)
    next(iter(batches.step(BatchPlan(1, 8, 100), min_batch=4)))
    # 8 given out; ahead at most 8 more, the least next step, and 1 for each micro-batch to come
    assert 8 + 4 <= len(read) <= 8 + 8 + 4 + 100


# the shape of a step


@often
@given(make=loaders(), plans=some_plans, remainder=st.sampled_from(["share", "step", "drop"]))
def test_no_micro_batch_exceeds_the_plan_and_a_step_has_as_many_as_planned(make, plans, remainder):
    for number, step in enumerate(one_pass(Batches(make(), remainder=remainder), plans)):
        plan = plans[number % len(plans)]
        assert max(len(chunk) for chunk in step) <= plan.micro
        assert min(plan.accumulation, sum(map(len, step))) <= len(step)


@often
@given(make=loaders(), plans=some_plans)
def test_every_step_but_the_last_is_as_planned_where_the_remainder_is_a_step(make, plans):
    taken = sizes(one_pass(Batches(make(), remainder="step"), plans))
    planned = [plans[number % len(plans)].batch_size for number in range(len(taken))]
    assert planned[:-1] == taken[:-1]
    assert taken[-1:] <= planned[-1:]


@often
@given(make=loaders(), plans=some_plans)
def test_dropping_the_remainder_leaves_only_steps_as_planned(make, plans):
    expected = own_order(make)
    torch.manual_seed(SEED)
    steps = one_pass(Batches(make(), remainder="drop"), plans)
    planned = [plans[number % len(plans)].batch_size for number in range(len(steps) + 1)]
    assert planned[:-1] == sizes(steps)
    assert expected[: sum(planned[:-1])] == flat(steps)
    assert len(expected) < sum(planned)


def test_equal_micro_batches_are_cut_where_the_plan_divides():
    steps = one_pass(Batches(ragged([10, 2, 12])), [BatchPlan(1, 4, 3)])
    assert [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]] == steps[:1]
    assert [4, 4, 4] == [len(chunk) for chunk in steps[1]]


# the remainder of an epoch


@property_test(600)
@given(
    bounds=st.tuples(st.integers(1, 30), st.integers(0, 40)),
    wanted=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 5)), min_size=1, max_size=4),
    micro=st.integers(1, 9),
    own_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=25),
)
def test_no_step_leaves_its_bounds_where_a_cut_of_the_last_two_can_keep_them(
    bounds, wanted, micro, own_sizes
):
    min_batch, max_batch = bounds[0], bounds[0] + bounds[1]
    plans = []
    for size, k in wanted:
        k = max(k, -(-min(max(size, min_batch), max_batch) // micro))
        low, high = -(-min_batch // k), max_batch // k
        assume(low <= high)
        plans.append(BatchPlan(1, min(max(size // k, low), high, micro), k))
        assume(min_batch <= plans[-1].batch_size)
    steps = one_pass(Batches(ragged(own_sizes)), plans, min_batch=min_batch, max_batch=max_batch)
    taken = sizes(steps)
    assert max(taken) <= max_batch
    if len(taken) == 1:
        return
    *before, last = taken
    assert all(min_batch <= size for size in before[:-1])
    if min(before[-1], last) < min_batch:
        both = before[-1] + last
        cuts = [a for a in range(min_batch, max_batch + 1) if min_batch <= both - a <= max_batch]
        assert both > max_batch, "they could have been one step"
        assert [] == cuts, "they could have been shared"


def test_without_an_upper_bound_a_short_remainder_joins_the_last_step():
    assert [8, 8, 11] == sizes(one_pass(Batches(ragged([27])), [BatchPlan(1, 4, 2)], min_batch=4))


def test_a_remainder_that_would_exceed_the_upper_bound_is_shared_by_the_last_two_steps():
    plans = [BatchPlan(1, 4, 2)]
    assert [8, 8, 6, 5] == sizes(one_pass(Batches(ragged([27])), plans, min_batch=4, max_batch=10))


def test_a_remainder_of_the_least_size_is_a_step_of_its_own():
    plans = [BatchPlan(1, 4, 2)]
    assert [8, 8, 4] == sizes(one_pass(Batches(ragged([20])), plans, min_batch=4, max_batch=8))


def test_an_epoch_below_the_least_step_is_one_step():
    assert [3] == sizes(
        one_pass(Batches(ragged([2, 1])), [BatchPlan(1, 4, 2)], min_batch=4, max_batch=8)
    )


def test_a_last_sample_of_its_own_is_no_reason_to_exceed_the_bound():
    assert [2, 2, 2, 1] == sizes(
        one_pass(Batches(ragged([7])), [BatchPlan(1, 2, 1)], min_batch=2, max_batch=2)
    )


# batches that cannot be glued, or not even counted


def padded(sizes_and_widths: list[tuple[int, int]]) -> list[Tensor]:
    """Batches of token sequences; the first column numbers the samples."""
    found, start = [], 0
    for size, width in sizes_and_widths:
        batch = torch.zeros(size, width, dtype=torch.int64)
        batch[:, 0] = torch.arange(start, start + size)
        found.append(batch)
        start += size
    return found


@often
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=10),
    plans=some_plans,
)
def test_batches_padded_to_different_lengths_are_cut_and_never_glued(shapes, plans):
    loader = padded(shapes)
    widths = dict(enumerate(chain.from_iterable([width] * size for size, width in shapes)))

    def read(batch: Tensor) -> list[int]:
        numbers: list[int] = batch[:, 0].tolist()
        assert {batch.shape[1]} == {widths[number] for number in numbers}
        return numbers

    steps = one_pass(Batches(loader), plans, read=read)
    assert list(widths) == flat(steps)
    for number, step in enumerate(steps):
        plan = plans[number % len(plans)]
        assert max(map(len, step)) <= plan.micro
        assert min(plan.accumulation, sum(map(len, step))) <= len(step)


def sequence_first(batch: list[int]) -> Tensor:
    """(T, B, F), 5 time steps; feature 0 numbers the samples."""
    return torch.tensor(batch).reshape(1, -1, 1).expand(5, -1, 2)


@often
@given(n=st.integers(1, 40), size=st.integers(1, 9), plans=some_plans)
def test_sequence_first_batches_are_cut_by_a_split_of_ones_own(n, size, plans):
    batches = Batches(
        DataLoader(range(n), size, collate_fn=sequence_first),
        split=lambda batch, lo, hi: batch[:, lo:hi],
        count=lambda batch: batch.shape[1],
    )

    def read(batch: Tensor) -> list[int]:
        assert (5, 2) == (batch.shape[0], batch.shape[2])
        return batch[0, :, 0].tolist()

    assert list(range(n)) == flat(one_pass(batches, plans, read=read))


def test_the_wrong_axis_is_not_read_as_samples():
    batches = Batches(DataLoader(range(32), 8, collate_fn=sequence_first))
    batches.start(0)
    with pytest.raises(BatchError, match=r"5 samples.*batch size is 8.*split="):
        batches.step(BatchPlan(1, 4, 2), min_batch=1)


def test_eight_images_of_three_channels_are_not_read_as_three_samples():
    def images(batch: list[int]) -> list[Tensor]:
        return [torch.zeros(3, 16 + number, 16) for number in batch]

    batches = Batches(DataLoader(range(32), 8, collate_fn=images))
    batches.start(0)
    with pytest.raises(BatchError, match=r"3 samples.*batch size is 8.*split="):
        batches.step(BatchPlan(1, 4, 2), min_batch=1)


def test_a_data_set_smaller_than_a_batch_is_no_wrong_axis():
    assert [[[0], [1, 2]]] == one_pass(Batches(DataLoader(range(3), 8)), [BatchPlan(1, 2, 2)])


# what is refused


def test_a_loader_that_can_be_read_only_once_is_refused():
    with pytest.raises(SettingError, match="used up after one pass"):
        Batches(batch for batch in ragged([4, 4]))


def test_a_function_is_drawn_from_without_end_and_one_batch_ahead():
    drawn = []

    def draw() -> Tensor:
        drawn.append(len(drawn))
        return torch.arange(4) + 4 * drawn[-1]

    batches = Batches(draw)
    batches.start(0)
    taken = []
    for plan in [
        BatchPlan(1, 4, 2),
        BatchPlan(1, 3, 3),
        BatchPlan(1, 10, 2),
        BatchPlan(1, 4, 1),
    ] * 9:
        step = batches.step(plan, min_batch=4)
        micro_batches = []
        for micro_batch in step:
            micro_batches += micro_batch.batch.tolist()
            assert len(drawn) == micro_batches[-1] // 4 + (2 if micro_batches[-1] % 4 == 3 else 1)
        assert plan.batch_size == len(micro_batches)
        taken += micro_batches
    assert list(range(len(taken))) == taken
    assert batches.samples is None


@pytest.mark.parametrize("draws", [False, True])
def test_a_function_that_draws_no_numbers_is_named_when_a_pass_continues(draws):
    def make() -> Callable[[], Tensor]:
        numbers = itertools.count()
        return lambda: torch.rand(4) if draws else torch.full((4,), float(next(numbers)))

    first, second = Batches(make()), Batches(make())
    first.start(0)
    for _ in range(2):
        list(first.step(BatchPlan(1, 3, 1), min_batch=1))
    with warnings.catch_warnings(record=True, action="always") as caught:
        second.load_state_dict(through_a_file(first.state_dict()), epoch=0)
    assert [True] * (not draws) == ["no position of it" in str(note.message) for note in caught]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            iter([torch.ones(4)]).__next__,
            "ended with StopIteration, and each call has to give one batch, without end",
        ),
        (lambda: iter([torch.ones(4)]), "gave an iterator, and each call has to give one batch"),
        (lambda: None, "a batch holds a NoneType"),
    ],
)
def test_a_function_that_does_not_give_one_batch_after_another_is_refused(draw, message):
    batches = Batches(draw)
    batches.start(0)
    with pytest.raises(BatchError, match=message):
        list(batches.step(BatchPlan(1, 4, 2), min_batch=1))


def test_an_unknown_remainder_is_refused_with_its_value():
    with pytest.raises(SettingError, match=r"remainder='keep'.*\"share\""):
        Batches(ragged([4]), remainder="keep")


@pytest.mark.parametrize("option", [{"split": lambda b, lo, hi: b[lo:hi]}, {"count": len}])
def test_split_needs_a_count_and_count_a_split(option):
    with pytest.raises(SettingError, match="split= and count= belong together"):
        Batches(ragged([4]), **option)


def test_a_pass_over_batches_that_cannot_be_glued_continues_with_exactly_the_rest():
    widths = [(8, 1), (2, 3), (4, 1), (8, 3)]
    starts = [0, 8, 10, 14]
    loader = [
        torch.arange(first, first + n).view(-1, 1).expand(n, width)
        for (n, width), first in zip(widths, starts, strict=True)
    ]
    plan = BatchPlan(1, 3, 2)

    def steps(batches):
        while micro_batches := batches.step(plan, min_batch=6, max_batch=18):
            taken = [m[:, 0].tolist() for m, *_ in micro_batches]
            yield [sample for samples_of_rank in taken for sample in samples_of_rank]

    uninterrupted = Batches(loader)
    uninterrupted.start(0)
    expected = list(steps(uninterrupted))
    for stop in range(1, len(expected)):
        first = Batches(loader)
        first.start(0)
        before = [step for _, step in zip(range(stop), steps(first), strict=False)]
        second = Batches(loader)
        second.load_state_dict(first.state_dict(), 0)
        assert expected == before + list(steps(second))
    assert list(range(22)) == [sample for step in expected for sample in step]


def adaptive(loader: Any) -> bb.AdaptiveBatch:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.Fixed(4), batch_size=4, micro_batch=4, every=1
    )


@pytest.mark.parametrize(
    "loader", [[], [torch.zeros(0, 1)], Batches(ragged([3]), remainder="drop")]
)
def test_a_loader_without_samples_raises(loader):
    with pytest.raises(LoopError, match="gave no step"):
        list(adaptive(loader))


def test_a_loader_that_is_used_up_after_its_first_epoch_raises():
    class Once:
        def __init__(self) -> None:
            self.rest = iter([torch.ones(4, 1)])

        def __iter__(self) -> Iterator[Tensor]:
            return self.rest

    train = adaptive(Once())
    for step in train:
        for x in step:
            step.backward(train.model(x).mean())
        step.update()
    with pytest.raises(LoopError, match="gave no step"):
        list(train)


# what the loader says of itself


@pytest.mark.parametrize(
    ("loader", "batch_size", "samples"),
    [
        (DataLoader(range(10), 4), 4, 10),
        (DataLoader(range(10), 4, drop_last=True), 4, 8),
        (DataLoader(Stream(10), 4), 4, None),
        (DataLoader(range(10), batch_sampler=[[0, 1], [2]]), None, None),
        (DataLoader(range(10), batch_size=None), None, None),
        (ragged([4, 4]), None, None),
    ],
)
def test_batch_size_and_samples_are_known_only_where_the_loader_says_so(
    loader, batch_size, samples
):
    batches = Batches(loader)
    assert (batch_size, samples) == (batches.batch_size, batches.samples)


def test_a_distributed_sampler_gets_the_epoch():
    def sampler() -> DistributedSampler:
        return DistributedSampler(range(40), num_replicas=1, rank=0, shuffle=True, seed=SEED)

    expected = sampler()
    expected.set_epoch(3)
    batches = Batches(DataLoader(range(40), 8, sampler=sampler()))
    assert list(expected) == flat(one_pass(batches, [BatchPlan(1, 3, 2)], epoch=3))


# resume


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what users' data sets draw from


def interrupted(
    make: Callable[[], Any], plans: list[BatchPlan], stop: int, epoch: int = 0, **more: Any
) -> tuple[Steps, Steps]:
    """(an uninterrupted epoch, the same one killed after `stop` steps and resumed elsewhere)."""

    def after_earlier_epochs() -> Batches:
        seed_all(SEED)
        batches = Batches(make())
        for earlier in range(epoch):
            one_pass(batches, plans, epoch=earlier, **more)
        return batches

    uninterrupted = one_pass(after_earlier_epochs(), plans, epoch=epoch, **more)

    batches = after_earlier_epochs()
    batches.start(epoch)
    before = list(islice(rest_of_pass(batches, plans, **more), stop))
    state = through_a_file({"batches": batches.state_dict(), "random": random_state()})

    seed_all(SEED + 99)
    batches = Batches(make())
    batches.load_state_dict(state["batches"], epoch)
    restore_random_state(state["random"])
    return uninterrupted, before + list(rest_of_pass(batches, plans, first=len(before), **more))


@often
@given(make=loaders(), plans=some_plans, stop=st.integers(0, 12), min_batch=st.integers(1, 6))
def test_a_killed_pass_continues_with_exactly_the_rest(make, plans, stop, min_batch):
    uninterrupted, resumed = interrupted(make, plans, stop, min_batch=min_batch)
    assert uninterrupted == resumed


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh workers", "persistent workers"])
@pytest.mark.parametrize("generator", [False, True], ids=["global seed", "generator"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_killed_pass_over_two_workers_continues_with_exactly_the_rest(
    epoch, generator, persistent
):
    def make() -> DataLoader:
        return DataLoader(
            range(40),
            4,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            generator=seeded() if generator else None,
        )

    uninterrupted, resumed = interrupted(make, [BatchPlan(1, 3, 2), BatchPlan(1, 2, 1)], 3, epoch)
    assert uninterrupted == resumed


class Augmented:
    """Numbers with noise from every generator that users' data sets draw from."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.samples:
            raise IndexError(index)
        noise = torch.rand((), dtype=torch.float64)
        return noise + index + 1e3 * random.random() + 1e6 * numpy.random.rand()  # noqa: NPY002


@property_test(60)
@given(
    shuffle=st.booleans(),
    generator=st.booleans(),
    size=st.integers(1, 9),
    plans=some_plans,
    stop=st.integers(0, 9),
    epoch=st.integers(0, 1),
)
def test_augmentation_continues_bit_for_bit_between_draws_of_dropout(
    shuffle, generator, size, plans, stop, epoch
):
    def make() -> DataLoader:
        own = seeded() if generator else None
        return DataLoader(Augmented(37), size, shuffle=shuffle, generator=own)

    def drop_out(batch: Tensor) -> list[float]:
        torch.rand(len(batch))  # what a model draws between two fetches
        return batch.tolist()

    uninterrupted, resumed = interrupted(make, plans, stop, epoch, read=drop_out)
    assert uninterrupted == resumed


class Drawing(IterableDataset[Tensor]):
    """Samples that are drawn as they are read, or none of them."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(20):
            yield torch.rand(()) if self.draws else torch.tensor(float(index))


@pytest.mark.parametrize("draws", [False, True])
def test_a_loader_that_draws_as_it_is_read_learns_where_it_continues(draws: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        uninterrupted, resumed = interrupted(
            lambda: DataLoader(Drawing(draws), 3), [BatchPlan(1, 4, 1)], 2
        )
    assert uninterrupted == resumed  # no model draws in between
    assert draws == any(
        "draws its order from a global generator" in str(note.message) for note in caught
    )


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Labelled:
    x: Tensor
    name: list[str]


@pytest.mark.parametrize(
    ("wrap", "read"),
    [
        pytest.param(lambda x: (x, x), lambda b: b[0].tolist(), id="tuple"),
        pytest.param(lambda x: {"x": x, "s": ["a"] * 8}, lambda b: b["x"].tolist(), id="dict"),
        pytest.param(lambda x: UserDict(x=x), lambda b: b["x"].tolist(), id="BatchEncoding"),
        pytest.param(lambda x: Pair(x, x), lambda b: b.x.tolist(), id="named tuple"),
        pytest.param(lambda x: Labelled(x, ["a"] * 8), lambda b: b.x.tolist(), id="dataclass"),
        pytest.param(lambda x: x.numpy(), lambda b: b.tolist(), id="array"),
    ],
)
def test_samples_in_waiting_survive_a_file_without_pickle(wrap, read):
    def make() -> list[Any]:
        return [wrap(torch.arange(8)), wrap(torch.arange(8, 16))]

    uninterrupted, resumed = interrupted(make, [BatchPlan(1, 3, 1)], 1, read=read)
    assert uninterrupted == resumed


def test_the_saved_position_does_not_move_with_the_training():
    batches = Batches(ragged([5, 5, 5]))
    batches.start(0)
    steps = rest_of_pass(batches, [BatchPlan(1, 2, 2)])
    next(steps)
    state = batches.state_dict()
    rest = list(steps)
    resumed = Batches(ragged([5, 5, 5]))
    resumed.load_state_dict(state, 0)
    assert rest == list(rest_of_pass(resumed, [BatchPlan(1, 2, 2)]))


def test_a_state_between_epochs_starts_the_next_one():
    plans = [BatchPlan(1, 4, 2)]
    batches = Batches(ragged([10]))
    assert 0 == batches.consumed
    one_pass(batches, plans)
    assert 10 == batches.consumed
    resumed = Batches(ragged([10]))
    resumed.load_state_dict(through_a_file(batches.state_dict()), 1)
    assert not resumed.open
    assert list(range(10)) == flat(one_pass(resumed, plans, epoch=1))


def saved_after_a_step(batches: Batches) -> dict[str, Any]:
    batches.start(0)
    next(rest_of_pass(batches, [BatchPlan(1, 4, 2)]))
    return through_a_file(batches.state_dict())


def test_a_shorter_loader_is_refused_at_resume():
    state = saved_after_a_step(Batches(ragged([4, 4, 4, 4])))
    with pytest.raises(StateError, match=r"only 1 batches.*at least 3.*same data"):
        Batches(ragged([4])).load_state_dict(state, 0)


def test_a_loader_without_the_generator_of_the_state_is_refused():
    with_generator = DataLoader(range(32), 4, shuffle=True, generator=seeded())
    state = saved_after_a_step(Batches(with_generator))
    with pytest.raises(StateError, match="generator"):
        Batches(DataLoader(range(32), 4, shuffle=True)).load_state_dict(state, 0)


# read ahead


class Ragged:
    """Batches of 3 samples whose widths differ, so that two cannot be concatenated."""

    def __iter__(self):
        for number in range(8):
            first = torch.arange(3 * number, 3 * number + 3)
            yield first[:, None].expand(3, 1 + number % 2).clone()


def halves(batch, lo, hi):
    return {"rows": batch["rows"][lo:hi], "all": batch["all"]}


READ_AHEAD = {
    "equal": ([torch.arange(3 * n, 3 * n + 3)[:, None] for n in range(8)], {}),
    "ragged": (Ragged(), {}),
    "split": (
        [{"rows": torch.arange(3 * n, 3 * n + 3)[:, None], "all": torch.ones(2)} for n in range(8)],
        {"split": halves, "count": lambda batch: len(batch["rows"])},
    ),
}


def rows_of(batch):
    return (batch["rows"] if isinstance(batch, dict) else batch)[:, 0].tolist()


@pytest.mark.parametrize("kind", READ_AHEAD)
@pytest.mark.parametrize("opened", [True, False])
def test_samples_that_were_read_ahead_and_changed_are_those_of_the_next_steps(kind, opened):
    loader, options = READ_AHEAD[kind]
    batches = Batches(loader, **options)
    seen = []
    if opened:
        batches.start(0)
        seen += [rows_of(m.batch) for m in batches.step(BatchPlan(1, 1, 4), 1)]
    with batches.peek(10, epoch=0) as (samples, available):
        assert 10 == available
        first = samples.peek(1, 8)
        start = 4 if opened else 0
        assert list(range(start + 1, start + 8)) == [n for b, _ in first for n in rows_of(b)]
        assert 7 == sum(samples for _, samples in first)
        assert (len(first) == 1) == (kind == "equal")
        for batch, _ in first:
            (batch["rows"] if isinstance(batch, dict) else batch).zero_()
    assert opened == batches.open
    if not opened:
        batches.start(0)
    while (step := batches.step(BatchPlan(1, 1, 4), 1)) is not None:
        seen += [rows_of(m.batch) for m in step]
    assert list(range(24)) == [n for numbers in seen for n in numbers]


def test_the_end_that_was_read_ahead_is_not_known_earlier():
    batches = Batches([torch.arange(4), torch.arange(4, 6)])
    batches.start(0)
    with batches.peek(100, epoch=0) as (_, available):
        assert 6 == available
    assert batches.samples is None
    assert [[0, 1, 2], [3, 4, 5]] == [
        m.batch.tolist() for m in batches.step(BatchPlan(1, 3, 2), min_batch=1)
    ]
