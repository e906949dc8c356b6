"""Loaders that write into memory of earlier batches, and tensors that belong to every sample."""

import warnings
from dataclasses import InitVar, dataclass, make_dataclass
from itertools import chain

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from bigbatch.data.batches import Batches
from bigbatch.errors import BatchError
from bigbatch.policies.plan import BatchPlan

SIZE, PASS = 8, 64


class Buffers:
    """Yields the same few buffers again and again, filled in turn."""

    def __init__(self, ring, wrap, *, views=False):
        self.ring, self.wrap, self.views = ring, wrap, views

    def __iter__(self):
        buffers = [torch.empty(SIZE, 2, dtype=torch.int64) for _ in range(self.ring)]
        for number, start in enumerate(range(0, PASS, SIZE)):
            buffer = buffers[number % self.ring]
            buffer.copy_(torch.arange(start, start + SIZE)[:, None].expand(-1, 2))
            yield self.wrap(buffer[:] if self.views else buffer)


WRAPS = {
    "tensor": lambda buffer: buffer,
    "array": lambda buffer: buffer.numpy(),
    "pair": lambda buffer: (buffer, torch.zeros(SIZE)),
    "mapping": lambda buffer: {"x": buffer[:, 0], "names": [str(n) for n in buffer[:, 1].tolist()]},
}
PLANS = [BatchPlan(1, SIZE, 3), BatchPlan(1, SIZE, 1), BatchPlan(1, 3, 2), BatchPlan(1, PASS, 1)]


def numbers(batch):
    while isinstance(batch, tuple | dict):
        batch = batch[0] if isinstance(batch, tuple) else batch["x"]
    return numpy.asarray(batch).reshape(len(batch), -1)[:, 0].tolist()


def passes(batches, plan, count=1, read=numbers):
    """What the steps of some passes gave; read at the end of a step, as its losses may be."""
    found = []
    for epoch in range(count):
        batches.start(epoch)
        while (step := batches.step(plan, min_batch=1)) is not None:
            found += [read(batch) for batch, *_ in [*step]]
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("ring", [1, 2, 4, 6])
@pytest.mark.parametrize("views", [False, True])
def test_a_loader_that_reuses_its_buffers_loses_no_sample(views, ring, name, plan):
    given = passes(Batches(Buffers(ring, WRAPS[name], views=views)), plan, count=2)
    assert [*range(PASS)] * 2 == [*chain(*given)]


@dataclass
class Sample:
    x: object
    scale: object


@pytest.mark.parametrize("wrap", [Sample, lambda x, scale: Sample(x.numpy(), scale)])
def test_batches_that_are_cut_by_a_function_of_ones_own_are_copied_too(wrap):
    loader = Buffers(1, lambda buffer: wrap(buffer, torch.ones(())))
    batches = Batches(
        loader,
        split=lambda batch, lo, hi: Sample(batch.x[lo:hi], batch.scale),
        count=lambda batch: len(batch.x),
    )
    given = passes(batches, PLANS[2], read=lambda batch: numbers(batch.x))
    assert [*range(PASS)] == [*chain(*given)]


class Staged(DataLoader):
    """Copies what torch collates into a buffer of its own, as loaders for GPUs do."""

    def __iter__(self):
        buffer = torch.empty(SIZE, dtype=torch.int64)
        for batch in super().__iter__():
            yield buffer.copy_(batch)


class Wrapper:
    """Has every attribute of a DataLoader, and other batches."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __iter__(self):
        return Staged.__iter__(Staged(range(PASS), SIZE))


@pytest.mark.parametrize(
    "loader", [Staged(range(PASS), SIZE), Wrapper(DataLoader(range(PASS), SIZE))]
)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_memory_of_a_loader_around_a_data_loader_is_watched(plan, loader):
    assert [*range(PASS)] == [*chain(*passes(Batches(loader), plan))]


@dataclass
class Converted:
    """Cannot be made of its fields alone."""

    x: torch.Tensor
    dtype: InitVar[torch.dtype]

    def __post_init__(self, dtype):
        self.x = self.x.to(dtype)


def test_what_cannot_be_made_again_is_not_copied_and_its_split_cuts_it():
    loader = [Converted(torch.arange(s, s + SIZE), torch.int64) for s in range(0, PASS, SIZE)]
    with pytest.raises(BatchError, match=r"Converted, which cannot be cut.*split=lambda"):
        passes(Batches(loader), PLANS[2])
    batches = Batches(
        loader,
        split=lambda batch, lo, hi: Converted(batch.x[lo:hi], torch.int64),
        count=lambda batch: len(batch.x),
    )
    given = passes(batches, PLANS[2], read=lambda batch: batch.x.tolist())
    assert [*range(PASS)] == [*chain(*given)]


def test_what_a_trained_encoder_computed_keeps_its_graph():
    weight = torch.ones((), requires_grad=True)
    loader = [weight * torch.arange(SIZE) for _ in range(3)]
    read = [batch.grad_fn for batch in passes(Batches(loader), PLANS[1], read=lambda batch: batch)]
    assert all(read)


def test_sparse_tensors_are_given_as_they_are():
    loader = [torch.eye(SIZE).to_sparse() for _ in range(3)]
    given = passes(Batches(loader), PLANS[1], read=lambda batch: batch)
    assert all(one is other for one, other in zip(loader, given, strict=True))


def test_a_loader_with_memory_for_each_batch_is_not_copied_after_64_batches():
    given = [torch.arange(start, start + SIZE) for start in range(0, 9 * PASS, SIZE)]
    kept = passes(Batches(given), BatchPlan(1, SIZE, 1), read=lambda batch: batch.data_ptr())
    same = [batch.data_ptr() == place for batch, place in zip(given, kept, strict=True)]
    assert [False] * 64 + [True] * 8 == same


# containers that are filled again, and buffers that are filled ahead


def refilled(container, put):
    """Yields one container again and again."""
    for start in range(0, LONG, SIZE):
        put(container, torch.arange(start, start + SIZE))
        yield container


LONG = 200 * SIZE
FilledClass = make_dataclass("FilledClass", ["x"])
CONTAINERS = {
    "dict": (dict, lambda c, x: c.update(x=x), lambda c: c["x"]),
    "list": (lambda: [None], lambda c, x: c.__setitem__(0, x), lambda c: c[0]),
    "dataclass": (lambda: FilledClass(None), lambda c, x: setattr(c, "x", x), lambda c: c.x),
    "in a tuple": (lambda: ({},), lambda c, x: c[0].update(x=x), lambda c: c[0]["x"]),
}


@pytest.mark.parametrize("plan", [BatchPlan(1, SIZE, 5), BatchPlan(1, 3, 7)], ids=str)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_is_filled_again_loses_no_sample(name, plan):
    make, put, read = CONTAINERS[name]
    loader = type("Loader", (), {"__iter__": lambda self: refilled(make(), put)})()
    given = passes(Batches(loader), plan, read=lambda batch: read(batch).tolist())
    assert [*range(LONG)] == [*chain(*given)]


class Ahead:
    """Fills buffers ahead, as far as it may: all but the one that was given last."""

    def __init__(self, ring, first=0):
        self.ring, self.first = ring, first

    def __iter__(self):
        buffers = torch.empty(self.ring, SIZE, dtype=torch.int64)
        filled = 0
        for number, start in enumerate(range(0, LONG, SIZE)):
            while filled < min(number + self.ring - 1, LONG // SIZE):
                buffers[filled % self.ring] = torch.arange(SIZE) + filled * SIZE
                filled += 1
            yield torch.arange(SIZE) + start if number < self.first else buffers[number % self.ring]


@pytest.mark.parametrize("plan", [BatchPlan(1, SIZE, 1), BatchPlan(1, SIZE, 40)], ids=str)
@pytest.mark.parametrize("loader", [Ahead(6), Ahead(18), Ahead(40), Ahead(2, first=40)], ids=vars)
def test_buffers_that_are_filled_ahead_lose_no_sample(loader, plan):
    assert [*range(LONG)] == [*chain(*passes(Batches(loader), plan))]


# what belongs to every sample

TABLES = {
    "embeddings": torch.arange(SIZE * 3.0).view(SIZE, 3),
    "array": numpy.arange(2.0 * SIZE).reshape(SIZE, 2),
    "names": [f"class {number}" for number in range(SIZE)],
}


def with_table(table):
    return [{"table": table, "x": torch.arange(s, s + SIZE)} for s in range(0, PASS, SIZE)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_the_same_tensor_in_two_batches_is_not_cut(name, plan):
    table = TABLES[name]
    batches = Batches(with_table(table))
    given = passes(batches, plan, read=lambda batch: (numbers(batch), batch["table"]))
    assert [*range(PASS)] == [*chain(*(x for x, _ in given))]
    assert all(numpy.array_equal(table, one) for _, one in given)
    assert all(type(table) is type(one) for _, one in given)


def test_it_is_known_by_its_key_where_other_keys_come_and_go():
    loader = with_table(TABLES["embeddings"])
    loader = [{**({"id": b["x"] + 1} if n % 2 else {}), **b} for n, b in enumerate(loader)]
    given = passes(Batches(loader), PLANS[2], read=lambda batch: batch["table"])
    assert all(torch.equal(TABLES["embeddings"], one) for one in given)


def test_virtual_ranks_get_the_whole_of_it_and_it_may_be_longer_than_the_last_batch():
    loader = with_table(TABLES["embeddings"])
    loader[-1]["x"] = loader[-1]["x"][:5]
    batches = Batches(loader, virtual_ranks=2)
    given = passes(batches, BatchPlan(2, 3, 2), read=lambda batch: batch["table"])
    assert all(torch.equal(TABLES["embeddings"], one) for one in given)


def test_a_resumed_pass_does_not_cut_it_either():
    loader = with_table(TABLES["embeddings"])
    plan, batches = BatchPlan(1, 3, 1), Batches(loader)
    batches.start(0)
    first = [batch for batch, *_ in batches.step(plan, min_batch=1)]
    resumed = Batches(loader)
    resumed.load_state_dict(batches.state_dict(), epoch=0)
    (second,) = [batch for batch, *_ in resumed.step(plan, min_batch=1)]
    assert [0, 1, 2, 3, 4, 5] == [*first[0]["x"].tolist(), *second["x"].tolist()]
    assert torch.equal(TABLES["embeddings"], second["table"])


CUT = {
    "a mask of ones": [{"x": torch.arange(SIZE) + s, "mask": torch.ones(SIZE)} for s in (0, SIZE)],
    "one batch again and again": [{"x": torch.arange(SIZE), "y": torch.arange(SIZE)}] * 2,
    "equal labels": [{"x": torch.arange(SIZE) + s, "y": torch.arange(SIZE)} for s in (0, SIZE)],
}
ONES = torch.ones(SIZE)
CUT["one mask for all"] = [{"x": torch.arange(SIZE) + s, "mask": ONES} for s in (0, SIZE)]


@pytest.mark.parametrize("name", CUT)
def test_everything_else_is_cut(name):
    sizes = passes(
        Batches(CUT[name]), BatchPlan(1, 2, 1), read=lambda batch: {*map(len, batch.values())}
    )
    assert [{2}] * SIZE == sizes


def test_an_equal_table_in_memory_of_its_own_is_said_once():
    def collate(samples):
        return {"x": torch.tensor(samples), "table": torch.arange(64.0).view(8, 8)}

    batches = Batches(DataLoader(range(PASS), SIZE, collate_fn=collate))
    with pytest.warns(
        UserWarning, match=r"shape \(8, 8\), is equal in the loader's first two"
    ) as w:
        passes(batches, BatchPlan(1, 3, 2), count=2)
    assert 1 == len(w)


@pytest.mark.parametrize("labels", [torch.arange(SIZE), torch.arange(2) / torch.ones(4, 1)])
@pytest.mark.parametrize("shape", [(SIZE,), (SIZE, 1)])
def test_one_tensor_of_labels_in_all_batches_is_said_once_and_its_copies_are_cut(labels, shape):
    labels = labels.reshape(shape)
    loader = [(torch.arange(start, start + SIZE), labels) for start in range(0, PASS, SIZE)]
    with pytest.warns(UserWarning, match=r"shape \(8,.*is the same tensor.*y\.clone\(\)") as w:
        passes(Batches(loader), PLANS[2], count=2)
    assert 1 == len(w)
    copies = [(x, y.clone()) for x, y in loader]
    assert {3, 2} == {*passes(Batches(copies), PLANS[2], read=lambda batch: len(batch[1]))}


def test_ordinary_loaders_are_never_said():
    loader = DataLoader(torch.arange(PASS * 70.0).view(PASS, 70), SIZE)
    lists = [(torch.randn(SIZE, 70), torch.arange(SIZE) % 2) for _ in range(4)]
    with warnings.catch_warnings(action="error"):
        for batches in (Batches(loader), Batches(lists)):
            passes(batches, BatchPlan(1, 3, 2), read=lambda batch: None)
