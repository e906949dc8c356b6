"""The sample axis: batches of every nesting are counted, cut and glued, or refused."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from bigbatch.data.collate import (
    concatenate_samples,
    count_samples,
    interleave_samples,
    slice_samples,
)
from bigbatch.errors import BatchError
from property_tests import property_test

torch.set_num_threads(1)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Labelled:
    x: Tensor
    name: list[str]


def tensor(ids: list[int]) -> Tensor:
    """One row a sample; the row says which sample it is."""
    return torch.tensor(ids, dtype=torch.float32).reshape(-1, 1).repeat(1, 3)


def names(ids: list[int]) -> list[str]:
    return [f"sample {i}" for i in ids]


NESTINGS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": tensor,
    "whole numbers": lambda ids: torch.tensor(ids, dtype=torch.int64),
    "array": lambda ids: numpy.array(ids, dtype=numpy.int16),
    "strings": names,
    "plain numbers": lambda ids: [float(i) for i in ids],
    "tuple": lambda ids: (tensor(ids), torch.tensor(ids, dtype=torch.int64)),
    "tuple of strings": lambda ids: (tensor(ids), tuple(names(ids))),
    "list": lambda ids: [tensor(ids), numpy.array(ids), names(ids)],
    "list of one": lambda ids: [tensor(ids)],
    "named tuple": lambda ids: Pair(tensor(ids), tensor(ids).bool()),
    "dict": lambda ids: {"x": tensor(ids), "name": names(ids)},
    "ordered dict": lambda ids: OrderedDict(x=tensor(ids), y=tensor(ids)),
    "default dict": lambda ids: defaultdict(list, x=tensor(ids), y=tensor(ids)),
    "BatchEncoding": lambda ids: UserDict(input_ids=tensor(ids), labels=tensor(ids)),
    "dataclass": lambda ids: Labelled(tensor(ids), names(ids)),
    "nested": lambda ids: (
        {"views": (tensor(ids), [tensor(ids)])},
        Labelled(tensor(ids), names(ids)),
    ),
}
every_nesting = pytest.mark.parametrize("build", NESTINGS.values(), ids=NESTINGS.keys())


def plain(batch: Any) -> Any:
    """The batch with its types and values, in a form that == can compare."""
    if isinstance(batch, (Tensor, numpy.ndarray)):
        return type(batch), str(batch.dtype), batch.tolist()
    if isinstance(batch, Mapping):
        return type(batch), {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch), [plain(value) for value in batch]
    if is_dataclass(batch):
        return type(batch), {f.name: plain(getattr(batch, f.name)) for f in fields(batch)}
    return batch


@every_nesting
def test_every_nesting_counts_its_samples(build):
    assert [1, 2, 8] == [count_samples(build(list(range(n)))) for n in (1, 2, 8)]


@every_nesting
def test_a_cut_keeps_the_nesting_and_takes_its_samples(build):
    assert plain(build([2, 3, 4])) == plain(slice_samples(build(list(range(8))), 2, 5))


@every_nesting
def test_a_cut_leaves_the_batch_as_it_was(build):
    batch = build(list(range(8)))
    slice_samples(batch, 2, 5)
    assert plain(build(list(range(8)))) == plain(batch)


@every_nesting
@property_test(10)
@given(ends=st.lists(st.integers(0, 9), max_size=4).map(sorted))
def test_what_was_cut_glues_to_what_it_was(build, ends):
    batch = build(list(range(9)))
    chunks = [
        slice_samples(batch, lo, hi)
        for lo, hi in zip([0, *ends], [*ends, 9], strict=True)
        if lo < hi
    ]
    assert plain(batch) == plain(concatenate_samples(chunks))


def test_cutting_a_tensor_makes_a_view():
    batch = tensor([0, 1, 2, 3])
    samples_of_rank = slice_samples((batch, batch), 1, 3)[1]
    assert batch[1].data_ptr() == samples_of_rank.data_ptr()
    samples_of_rank.fill_(-1.0)
    assert [[0.0] * 3, [-1.0] * 3, [-1.0] * 3, [3.0] * 3] == batch.tolist()


def test_cutting_an_array_makes_a_view():
    batch = numpy.arange(4)
    assert numpy.shares_memory(batch, slice_samples({"x": batch}, 1, 3)["x"])


def test_one_batch_alone_is_not_copied():
    batch = (tensor([0, 1]), ["a", "b"])
    assert concatenate_samples([batch]) is batch


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 4), id="padded to other lengths"),
        pytest.param(numpy.zeros((2, 3)), numpy.zeros((2, 4)), id="arrays of other lengths"),
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 3, 1), id="another number of axes"),
        pytest.param(torch.zeros(2), torch.zeros(2, dtype=torch.int64), id="another dtype"),
        pytest.param(numpy.zeros(2), numpy.zeros(2, numpy.int8), id="arrays of another dtype"),
        pytest.param(torch.zeros(2), numpy.zeros(2), id="another type"),
        pytest.param({"x": torch.zeros(2)}, {"y": torch.zeros(2)}, id="other keys"),
        pytest.param((torch.zeros(2),), (torch.zeros(2),) * 2, id="another length"),
        pytest.param((torch.zeros(2, 3), ["a"] * 2), (torch.zeros(2, 4), ["a"] * 2), id="one leaf"),
    ],
)
def test_batches_that_differ_in_more_than_their_samples_do_not_glue(first, second):
    assert concatenate_samples([first, second]) is None
    assert concatenate_samples([first, first]) is not None


IMAGES = [torch.zeros(3, height, 16) for height in (20, 24)]
BOXES = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (5, 2)]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((torch.zeros(8, 2), torch.zeros(7)), id="unequal"),
        pytest.param((torch.zeros(35, 8, 4), torch.zeros(8)), id="sequence first"),
        pytest.param((IMAGES, BOXES), id="detection"),
        pytest.param({"x": torch.zeros(8), "ids": ["a"] * 7}, id="too few strings"),
        pytest.param({"x": torch.zeros(8), "epoch": 3}, id="a number for the whole batch"),
        pytest.param({"x": torch.zeros(8), "mask": None}, id="None"),
        pytest.param((torch.zeros(8), torch.tensor(3)), id="a tensor without axes"),
        pytest.param((torch.zeros(8), {1, 2}), id="a set"),
        pytest.param((), id="nothing"),
        pytest.param(Labelled, id="a class instead of its instance"),
    ],
)
def test_a_batch_without_a_shared_sample_axis_is_refused_and_split_is_named(batch):
    with pytest.raises(BatchError, match=r"split=lambda"):
        count_samples(batch)


def test_unequal_leaves_are_refused_with_their_sizes():
    with pytest.raises(BatchError, match=r"\[7, 8\]"):
        count_samples((torch.zeros(8, 2), torch.zeros(7)))


class Refused(dict):
    """As transformers' ModelOutput."""

    def update(self, *args):
        raise TypeError("cannot be updated")


class Wrapped(MutableMapping):
    """A mapping around a dict, which copy.copy would share."""

    def __init__(self, values):
        self.values_by_name = dict(values)

    def __getitem__(self, name):
        return self.values_by_name[name]

    def __setitem__(self, name, value):
        self.values_by_name[name] = value

    __delitem__ = None

    def __iter__(self):
        return iter(self.values_by_name)

    def __len__(self):
        return len(self.values_by_name)


@dataclass
class Masked:
    x: Tensor
    mask: Tensor | None = field(default=None, init=False)


def masked(x):
    batch = Masked(x)
    batch.mask = x[:, 0] > 1
    return batch


MADE = {
    "a dict without update": lambda x: Refused(x=x, mask=x[:, 0] > 1),
    "a mapping around a dict": lambda x: Wrapped({"x": x, "mask": x[:, 0] > 1}),
    "a field that is set later": masked,
}


@pytest.mark.parametrize("name", MADE)
def test_a_cut_is_of_the_class_of_its_batch_and_leaves_it(name):
    batch = MADE[name](tensor([0, 1, 2, 3]))
    part = slice_samples(batch, 1, 3)
    values = part if isinstance(part, Mapping) else vars(part)
    assert type(batch) is type(part)
    assert [1.0, 2.0] == values["x"][:, 0].tolist()
    assert [False, True] == values["mask"].tolist()
    assert 4 == count_samples(batch)


class OwnList(list):
    """A list that is made of something else."""

    def __init__(self, image, label):
        super().__init__([image, label])


UNCUT = {
    "a list with a constructor of its own": OwnList(torch.zeros(4, 2), torch.zeros(4)),
    "sparse": (torch.eye(4).to_sparse(), torch.zeros(4)),
    "sparse rows": torch.eye(4).to_sparse_csr(),
    "jagged": torch.nested.nested_tensor(
        [torch.zeros(n, 2) for n in (1, 2, 3, 4)], layout=torch.jagged
    ),
    "nested": torch.nested.nested_tensor([torch.zeros(n, 2) for n in (1, 2, 3, 4)]),
}


@pytest.mark.parametrize("name", UNCUT)
@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:Sparse CSR")
def test_what_cannot_be_cut_is_refused_and_split_is_named(name):
    if isinstance(batch := UNCUT[name], Tensor):
        assert 4 == count_samples(batch)
    with pytest.raises(BatchError, match=r"split=lambda"):
        slice_samples(batch, 1, 3)


class Captioned:
    """A data set of (tensor, str), as torch's own collate sees it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return torch.tensor(index), f"caption {index}"


def test_a_data_loader_of_tensors_and_strings_is_cut():
    batch = next(iter(DataLoader(Captioned(), batch_size=4)))
    image, caption = slice_samples(batch, 1, 3)
    assert ([1, 2], ["caption 1", "caption 2"]) == (image.tolist(), list(caption))


@dataclass
class Counted:
    x: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.x.sum()


def test_a_field_that_a_batch_makes_itself_is_made_again():
    samples_of_rank = slice_samples(Counted(torch.arange(6)), 1, 3)
    assert ([1, 2], 3) == (samples_of_rank.x.tolist(), samples_of_rank.total.item())


@property_test(100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_interleaved_samples_are_those_of_every_turn(counts, turns):
    batch = torch.arange(sum(counts))
    names = [f"{n}" for n in batch.tolist()]
    ends = pairwise([0, *accumulate(counts)])
    chunks = [{"x": batch[lo:hi], "name": names[lo:hi]} for lo, hi in ends]
    interleaved = interleave_samples(chunks, counts, turns)
    each = range(min(turns, len(batch)))
    assert [batch[turn::turns].tolist() for turn in each] == [d["x"].tolist() for d in interleaved]
    assert [names[turn::turns] for turn in each] == [d["name"] for d in interleaved]


def test_samples_that_do_not_fit_together_are_not_interleaved():
    assert interleave_samples([torch.zeros(2, 3), torch.zeros(2, 4)], [2, 2], 2) is None
