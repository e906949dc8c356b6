"""Loaders of every kind: their own state, streams, workers, ragged batches, epochs' ends."""

import random
import warnings
from dataclasses import dataclass
from itertools import islice

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from bigbatch import Batches, BatchPlan, ElasticDistributedSampler
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import BatchError, StateError
from tensors import through_a_file

SEED = 5
SAMPLES = 45
PLANS = [BatchPlan(1, 4, 2), BatchPlan(1, 3, 3), BatchPlan(1, 7, 1)]


class Recorded:
    """A data set that notes which samples were read in this process."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.read = samples, []

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        self.read.append(number)
        return torch.tensor(number)


class Sharded(IterableDataset):
    """A stream whose workers have every second sample each, and which can say where it stands."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.at = samples, 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = range(first, self.samples, step)
        start, self.at = self.at, 0
        for index in range(start, len(numbers)):
            self.at = index + 1
            yield torch.tensor(numbers[index])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def rest(batches, first=0):
    for index in range(first, 10**6):
        micro_batches = batches.step(PLANS[index % len(PLANS)], min_batch=4)
        if micro_batches is None:
            return
        yield [batch.tolist() for batch, *_ in micro_batches]


def interrupted(make, stop, epoch=0):
    """(an uninterrupted pass, the same one killed after some steps and taken up by a new process,
    the data set of the latter)."""
    torch.manual_seed(SEED)
    batches = Batches(make())
    batches.start(epoch)
    uninterrupted = list(rest(batches))

    torch.manual_seed(SEED)
    batches = Batches(make())
    batches.start(epoch)
    before = list(islice(rest(batches), stop))
    state = through_a_file({"batches": batches.state_dict(), "random": random_state()})

    torch.manual_seed(SEED + 1)
    loader = make()
    batches = Batches(loader)
    batches.load_state_dict(state["batches"], epoch)
    restore_random_state(state["random"])
    return uninterrupted, before + list(rest(batches, stop)), loader.dataset


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4])
@pytest.mark.parametrize("data", [Recorded, Sharded])
def test_a_loader_with_a_state_of_its_own_continues_from_it(data, workers, stop):
    def make():
        shuffle = {"shuffle": True} if data is Recorded else {}
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        return torchdata.StatefulDataLoader(data(), batch_size=6, num_workers=workers, **shuffle)

    uninterrupted, resumed, again = interrupted(make, stop)
    assert uninterrupted == resumed
    assert list(range(SAMPLES)) == sorted(n for step in resumed for chunk in step for n in chunk)
    if data is Recorded and not workers:
        given_out = sum(len(chunk) for step in uninterrupted[:stop] for chunk in step)
        assert SAMPLES - given_out // 6 * 6 == len(again.read)  # what was given out is not read


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_ledger_continues_without_reading_what_was_given_out(workers, stop):
    def make():
        data = Recorded()
        return DataLoader(
            data, 6, sampler=ElasticDistributedSampler(data, seed=SEED), num_workers=workers
        )

    uninterrupted, resumed, again = interrupted(make, stop, epoch=2)
    assert uninterrupted == resumed
    if not workers:
        given_out = sum(len(chunk) for step in uninterrupted[:stop] for chunk in step)
        assert SAMPLES - given_out // 6 * 6 == len(again.read)


def grouped(data):
    return BatchSampler(WeightedRandomSampler(torch.ones(SAMPLES), 31), 4, drop_last=True)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda d: DataLoader(d, 6, shuffle=True), id="shuffle"),
        pytest.param(lambda d: DataLoader(d, 6, drop_last=True, shuffle=True), id="drop_last"),
        pytest.param(lambda d: DataLoader(d, batch_sampler=grouped(d)), id="batch sampler"),
        pytest.param(
            lambda d: DataLoader(d, 6, sampler=DistributedSampler(d, 1, 0, seed=SEED)),
            id="DistributedSampler",
        ),
        pytest.param(
            lambda d: DataLoader(d, 6, sampler=RandomSampler(d, replacement=True, num_samples=20)),
            id="with replacement",
        ),
    ],
)
@pytest.mark.parametrize("stop", [0, 1, 2])
def test_any_sampler_continues_where_it_was(make, stop):
    uninterrupted, resumed, _ = interrupted(lambda: make(Recorded()), stop)
    assert uninterrupted == resumed


class Bucketed(Sampler):
    """Draws the order of each bucket when it is reached."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        for start in range(0, 48, 12):
            numbers = [start + int(n) for n in self.draw(12)]
            yield numbers[:6]
            yield numbers[6:]


DRAWS = {
    "torch": torch.randperm,
    "NumPy": numpy.random.permutation,
    "Python": lambda n: random.sample(range(n), n),
    "none": range,
}


@pytest.mark.parametrize("name", DRAWS)
def test_an_order_that_is_drawn_on_the_way_causes_a_warning(name):
    with warnings.catch_warnings(record=True, action="always") as caught:
        interrupted(lambda: DataLoader(Recorded(48), batch_sampler=Bucketed(DRAWS[name])), 4)
    assert (name != "none") == any("draws its order from" in str(note.message) for note in caught)


class Live:
    """A loader whose state is the dict that it changes later."""

    dataset = None

    def __init__(self):
        self.state = {"position": 0}

    def __iter__(self):
        while self.state["position"] < SAMPLES:
            position = self.state["position"]
            self.state["position"] += 5
            yield torch.arange(position, position + 5)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_state_that_the_loader_changes_later_is_copied(stop):
    uninterrupted, resumed, _ = interrupted(Live, stop)
    assert uninterrupted == resumed


# zero lag, no copies, little in waiting


def test_a_change_takes_effect_with_the_next_step_though_workers_have_prefetched():
    loader = DataLoader(range(64), 8, num_workers=2, prefetch_factor=3)
    batches = Batches(loader)
    batches.start(0)
    plans = [BatchPlan(1, 2, 2), BatchPlan(1, 8, 3), BatchPlan(1, 1, 3), BatchPlan(1, 11, 3)]
    sizes = [[samples for _, samples, _ in batches.step(plan, min_batch=1)] for plan in plans]
    assert [[2, 2], [8, 8, 8], [1, 1, 1], [11, 11, 11]] == sizes


def test_a_micro_batch_inside_one_loader_batch_is_a_view_and_only_others_are_copied():
    batches = Batches(DataLoader(torch.arange(32), 16))
    batches.start(0)
    chunks = [batch for batch, *_ in batches.step(BatchPlan(1, 6, 5), min_batch=1)]
    of = [chunk.untyped_storage().data_ptr() for chunk in chunks]
    assert of[0] == of[1]
    assert of[2] not in (of[0], of[3])  # 12 to 17: four of the first batch, two of the second
    assert of[3] == of[4]


@pytest.mark.parametrize("size", [24, 7], ids=["one batch", "batches that end anywhere"])
def test_virtual_ranks_are_served_in_turn_in_memory_of_their_own(size):
    tokens = torch.arange(24)[:, None] + torch.tensor([0, 100])
    batches = Batches([*tokens.split(size)], virtual_ranks=3)
    batches.start(0)
    chunks = [batch for batch, *_ in batches.step(BatchPlan(3, 4, 2), min_batch=1)]
    assert [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]] == [p[:, 0].tolist() for p in chunks[:3]]
    assert [[12, 15, 18, 21], [13, 16, 19, 22], [14, 17, 20, 23]] == [
        p[:, 0].tolist() for p in chunks[3:]
    ]
    assert [0, 100, 3, 103] == chunks[0].view(-1)[:4].tolist()  # as language models do


@pytest.mark.parametrize("virtual", [1, 4])
def test_a_loader_of_known_length_is_read_no_further_than_a_micro_batch_and_a_batch(virtual):
    data = Recorded(400)
    batches = Batches(DataLoader(data, 10), virtual_ranks=virtual)
    batches.start(0)
    given, most = 0, 0
    while micro_batches := batches.step(BatchPlan(virtual, 5, 4), min_batch=100, max_batch=300):
        for _, samples, _ in micro_batches:
            given += samples
            most = max(most, len(data.read) - given)
    assert 400 == given
    assert most <= 10 + (virtual > 1) * virtual * 5


@dataclass
class Sentence:
    tokens: torch.Tensor
    tags: list[str]
    extra: dict[str, tuple[torch.Tensor, torch.Tensor]]


def pad(numbers):
    width = 1 + max(numbers) % 5
    tokens = torch.tensor(numbers).view(-1, 1).expand(-1, width)
    pair = torch.tensor(numbers), torch.tensor(numbers) % 2
    return Sentence(tokens, [str(n) for n in numbers], {"pair": pair})


def test_nested_ragged_batches_of_a_users_collate_function_come_whole():
    loader = DataLoader(range(50), 7, collate_fn=pad)
    batches = Batches(loader)
    batches.start(0)
    all_numbers = []
    while micro_batches := batches.step(BatchPlan(1, 5, 3), min_batch=5):
        for sentence, samples, _ in micro_batches:
            numbers = sentence.tokens[:, 0].tolist()
            assert samples == len(numbers) == len(sentence.tags)
            assert numbers == sentence.extra["pair"][0].tolist()
            assert [str(n) for n in numbers] == sentence.tags
            all_numbers += numbers
    assert list(range(50)) == all_numbers


def test_a_sampler_that_gives_more_or_fewer_than_it_says_loses_nothing():
    class Says(torch.utils.data.Sampler):
        def __init__(self, said, gives):
            self.said, self.gives = said, gives

        def __len__(self):
            return self.said

        def __iter__(self):
            return iter(range(self.gives))

    for said, gives in [(20, 27), (27, 20), (20, 21), (21, 20), (20, 4)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of the length
            batches = Batches(DataLoader(range(100), 4, sampler=Says(said, gives)))
            batches.start(0)
            samples = [n for step in rest(batches) for chunk in step for n in chunk]
        assert list(range(gives)) == samples


def test_a_break_and_a_new_pass_over_the_loader_elsewhere_do_not_disturb_the_position():
    data = Recorded(30)
    loader = DataLoader(data, 5, sampler=ElasticDistributedSampler(data, seed=SEED))
    batches = Batches(loader)
    batches.start(0)
    first = [batch.tolist() for batch, *_ in batches.step(BatchPlan(1, 4, 2), min_batch=4)]
    elsewhere = [n for batch in loader for n in batch.tolist()]
    others = [chunk for step in rest(batches) for chunk in step]
    samples = [n for chunk in first + others for n in chunk]
    assert list(range(30)) == sorted(samples) == sorted(elsewhere)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU, none here")
def test_pinned_batches_stay_pinned_whether_cut_or_glued():
    loader = DataLoader(torch.arange(40.0), 8, pin_memory=True)
    batches = Batches(loader)
    batches.start(0)
    chunks = [batch for batch, *_ in batches.step(BatchPlan(1, 6, 6), min_batch=1)]
    assert all(chunk.is_pinned() for chunk in chunks)
    assert list(range(36)) == torch.cat(chunks).tolist()


@pytest.mark.parametrize("generator", [False, True])
def test_a_shuffled_pass_continues_with_batches_of_another_size(generator):
    def make(size):
        own = torch.Generator().manual_seed(SEED) if generator else None
        return DataLoader(Recorded(), size, shuffle=True, generator=own)

    torch.manual_seed(SEED)
    first = Batches(make(6))
    first.start(0)
    before = list(islice(rest(first), 3))
    state = through_a_file(first.state_dict())
    torch.manual_seed(SEED + 1)
    again = Batches(make(9))
    again.load_state_dict(state, 0)
    steps = before + list(rest(again, 3))
    assert list(range(SAMPLES)) == sorted(n for step in steps for chunk in step for n in chunk)


def test_dropping_the_remainder_of_a_stream_teaches_its_whole_length():
    batches = Batches(DataLoader(Sharded(100), 8), remainder="drop")
    for _ in range(2):
        batches.start(0)
        while micro_batches := batches.step(BatchPlan(1, 30, 2), min_batch=1):
            list(micro_batches)
        assert 100 == batches.samples


# persistent workers


def kept_workers(**more):
    return DataLoader(range(48), 4, num_workers=1, persistent_workers=True, shuffle=True, **more)


def samples_in(steps):
    return [n for step in steps for chunk in step for n in chunk]


@pytest.mark.filterwarnings("ignore:persistent workers keep random states")
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("looked", [False, True], ids=["untouched", "looked at before"])
@pytest.mark.parametrize("same", [False, True], ids=["another loader", "the same loader"])
def test_persistent_workers_continue_with_exactly_the_rest(same, looked, epoch):
    torch.manual_seed(SEED)
    loader = kept_workers()
    if looked:
        next(iter(loader))
    batches = Batches(loader)
    for number in range(epoch):
        batches.start(number)
        samples_in(rest(batches))
    batches.start(epoch)
    before = samples_in(islice(rest(batches), 2))
    state, random = batches.state_dict(), random_state()
    uninterrupted = before + samples_in(rest(batches))
    torch.manual_seed(SEED + 1)
    resumed = Batches(loader if same else kept_workers())
    resumed.load_state_dict(state, epoch)
    restore_random_state(random)
    assert uninterrupted == before + samples_in(rest(resumed))
    assert [*range(48)] == sorted(uninterrupted)


def test_persistent_workers_that_somebody_else_takes_are_missed():
    loader = kept_workers()
    batches = Batches(loader)
    batches.start(0)
    steps = rest(batches)
    next(steps)
    next(iter(loader))
    with pytest.raises(BatchError, match=r"iterated elsewhere.*persistent_workers=False"):
        samples_in(steps)


# batches of unusual samplers


class Rows:
    """A data set that reads many samples at once."""

    def __len__(self):
        return 24

    def __getitem__(self, numbers):
        return torch.tensor(numbers)


def test_a_sampler_of_whole_batches_gets_the_epoch_and_continues_by_its_ledger():
    def make():
        ledger = ElasticDistributedSampler(range(24), seed=SEED)
        return DataLoader(Rows(), batch_size=None, sampler=BatchSampler(ledger, 4, False))

    batches = Batches(make())
    assert (4, 24) == (batches.batch_size, batches.samples)
    orders = []
    for epoch in range(2):
        batches.start(epoch)
        orders.append(samples_in(rest(batches)))
    assert orders[0] != orders[1]
    batches.start(1)
    before = samples_in(islice(rest(batches), 1))
    resumed = Batches(make())
    resumed.load_state_dict(batches.state_dict(), 1)
    assert orders[1] == before + samples_in(rest(resumed))


class Shards:
    """A data set whose items are batches of four."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.arange(4 * number, 4 * number + 4)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_ledger_over_whole_batches_continues_with_exactly_the_rest(stop):
    def make():
        shards = Shards()
        return DataLoader(
            shards, batch_size=None, sampler=ElasticDistributedSampler(shards, seed=SEED)
        )

    batches = Batches(make())
    batches.start(0)
    uninterrupted = samples_in(rest(batches))
    batches.start(0)
    before = samples_in(islice(rest(batches), stop))
    resumed = Batches(make())
    resumed.load_state_dict(batches.state_dict(), 0)
    assert uninterrupted == before + samples_in(rest(resumed))
    assert [*range(32)] == sorted(uninterrupted)


class Growing(Sampler):
    """More samples in every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16 * (self.epoch + 1)

    def __iter__(self):
        return iter(range(len(self)))


def test_a_sampler_that_grows_by_the_epoch_continues():
    def make():
        return Batches(DataLoader(range(64), 4, sampler=Growing()))

    batches = make()
    batches.start(2)
    before = samples_in(islice(rest(batches), 2))
    resumed = make()
    resumed.load_state_dict(batches.state_dict(), 2)
    assert [*range(48)] == before + samples_in(rest(resumed))


@pytest.mark.parametrize("bad", [{9, 17, 18, 25, 33, 41, 49}, {63}, {8, 9, 10, 11, 12, 13, 14, 15}])
@pytest.mark.parametrize("remainder", ["share", "drop"])
def test_samples_that_a_collate_function_leaves_out_leave_no_step_below_its_micro_batches(
    remainder, bad
):
    def collate(items):
        return torch.tensor([item for item in items if item not in bad])

    batches = Batches(DataLoader(range(64), 8, collate_fn=collate), remainder=remainder)
    batches.start(0)
    steps = []
    while micro_batches := batches.step(BatchPlan(1, 2, 4), min_batch=8, max_batch=8):
        steps.append([batch.tolist() for batch, *_ in micro_batches])
    assert all(len(step) == 4 for step in steps)
    good = [n for n in range(64) if n not in bad]
    assert good[: len(good) - len(good) % 8 if remainder == "drop" else None] == samples_in(steps)


@pytest.mark.parametrize("stop", [0, 2, 5])
@pytest.mark.parametrize("kind", ["ledger", "no sampler", "another batch size"])
def test_a_pass_that_leaves_samples_out_continues_with_exactly_the_rest(kind, stop):
    def collate(items):
        return torch.tensor([item for item in items if item % 8 != 5 or item < 8])

    def make(size):
        ledger = ElasticDistributedSampler(range(64), seed=SEED, shuffle=False)
        sampler = None if kind == "no sampler" else ledger
        return Batches(DataLoader(range(64), size, collate_fn=collate, sampler=sampler))

    batches = make(8)
    batches.start(0)
    before = samples_in(islice(rest(batches), stop))
    state = batches.state_dict()
    uninterrupted = before + samples_in(rest(batches))
    assert 57 == len(set(uninterrupted)) == len(uninterrupted)
    resumed = make(4 if kind == "another batch size" else 8)
    resumed.load_state_dict(state, 0)
    assert uninterrupted == before + samples_in(rest(resumed))


def test_a_pass_that_leaves_samples_out_is_not_gone_on_with_on_other_ranks():
    def collate(items):
        return torch.tensor([item for item in items if item != 9])

    batches = Batches(
        DataLoader(
            range(64),
            8,
            collate_fn=collate,
            sampler=ElasticDistributedSampler(range(64), shuffle=False),
        )
    )
    batches.start(0)
    samples_in(islice(rest(batches), 3))
    with pytest.raises(StateError, match=r"fewer samples than it says.*number of ranks"):
        batches.load_state_dict(batches.state_dict(), 0, same_rank=False)


def test_a_pass_that_leaves_samples_out_after_a_jump_cannot_be_replayed_and_says_so():
    def make(size):
        sampler = ElasticDistributedSampler(range(64), shuffle=False)
        return Batches(DataLoader(range(64), size, collate_fn=without_41, sampler=sampler))

    def without_41(items):
        return torch.tensor([item for item in items if item != 41])

    first, second = make(8), make(4)
    first.start(0)
    samples_in(islice(rest(first), 2))
    second.load_state_dict(first.state_dict(), 0)
    make(4).load_state_dict(second.state_dict(), 0)  # nothing is left out yet
    samples_in(islice(rest(second), 4))
    with pytest.raises(StateError, match=r"change of the batch size"):
        make(4).load_state_dict(second.state_dict(), 0)


def test_a_first_batch_that_is_short_goes_where_its_samples_are_counted_by_the_user():
    def collate(items):
        return torch.tensor([item for item in items if item != 3])

    loader = DataLoader(range(16), 8, collate_fn=collate)
    refused = Batches(loader)
    refused.start(0)
    with pytest.raises(BatchError, match=r"7 samples.*left out.*count="):
        samples_in(rest(refused))
    counted = Batches(loader, split=lambda batch, lo, hi: batch[lo:hi], count=len)
    counted.start(0)
    assert 15 == len(samples_in(rest(counted)))


# a loader that its owner changes


def test_what_a_loader_states_is_read_when_it_is_used():
    sampler = ElasticDistributedSampler(range(30), num_replicas=1, rank=0)
    batch_sampler = BatchSampler(sampler, 8, drop_last=False)
    loader = ResumableLoader(DataLoader(range(30), batch_sampler=batch_sampler))
    assert (1, 30) == (loader.num_replicas, loader.length)
    assert loader.elastic_sampler is sampler
    sampler.num_replicas, batch_sampler.drop_last = 2, True
    assert (2, 8) == (loader.num_replicas, loader.length)  # one whole batch of this rank's 15
    assert loader.elastic_sampler is None


def test_batches_that_grow_within_a_pass_are_counted_right():
    batch_sampler = BatchSampler(range(32), 4, drop_last=False)
    loader = DataLoader(torch.arange(64).view(32, 2), batch_sampler=batch_sampler)
    batches = Batches(loader, split=lambda batch, low, high: batch[low:high], count=len)
    batches.start(epoch=0)
    counted = []
    while (step := batches.step(BatchPlan(1, 4, 1), min_batch=1)) is not None:
        counted += [(len(micro_batch.batch), micro_batch.samples) for micro_batch in step]
        batch_sampler.batch_size = 8
    assert all(rows == samples for rows, samples in counted)
    assert 32 == sum(rows for rows, _ in counted)
