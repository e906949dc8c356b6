"""Packed sequences: cut and joined at their boundaries, and nowhere else."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.data.packed_sequences import is_packed, pack, unpack
from bigbatch.errors import BatchError, SettingError
from property_tests import property_test


def row(lengths, *, boundaries=True, first=0):
    """A packed batch of numbered tokens, with everything that a collate function may add."""
    tokens = torch.arange(first, first + sum(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = {"input_ids": tokens, "labels": tokens + 1, "position_ids": positions}
    if boundaries:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths)}
        batch |= {"max_length_k": max(lengths), "seq_idx": numbers[None].to(torch.int32)}
    return batch


def same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[name]), name
            assert value.dtype == second[name].dtype, name
        else:
            assert value == second[name], name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans(), st.data())
@property_test(60)
def test_what_is_cut_and_joined_is_the_batch_again(lengths, boundaries, data):
    batch = row(lengths, boundaries=boundaries)
    sequences = unpack(batch)
    assert [sequence.length for sequence in sequences] == lengths
    cut = data.draw(st.integers(0, len(lengths)))
    same(pack(sequences), batch)
    if 0 < cut < len(lengths):
        same(pack(sequences[:cut]), row(lengths[:cut], boundaries=boundaries))
        second = row(lengths[cut:], boundaries=boundaries, first=sum(lengths[:cut]))
        same(pack(sequences[cut:]), second)
        same(pack([*sequences[:cut], *unpack(second)]), batch)


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("virtual_ranks", [1, 3])
def test_every_sequence_is_used_once_in_order_whatever_the_loaders_rows(boundaries, virtual_ranks):
    lengths = [random.Random(seed).choices(range(1, 20), k=7) for seed in range(6)]
    loader, first = [], 0
    for each in lengths:
        loader.append(row(each, boundaries=boundaries, first=first))
        first += sum(each)
    batches = bb.Batches(loader, packed=True, virtual_ranks=virtual_ranks)
    batches.start(0)
    plan, seen = bb.BatchPlan(virtual_ranks, 4 if virtual_ranks == 1 else 2, 2), []
    while step := batches.step(plan, 1):
        for micro in step:
            assert micro.samples == len(unpack(micro.batch))
            seen += micro.batch["input_ids"][0].tolist()
    assert sorted(seen) == list(range(first))
    assert (seen == sorted(seen)) == (virtual_ranks == 1)


def test_a_pass_resumes_at_a_sequence():
    loader = [row([3, 1, 4, 1, 5], first=0), row([9, 2, 6], first=14)]
    whole, plan = bb.Batches(loader, packed=True), bb.BatchPlan(1, 1, 2)
    whole.start(0)
    first = [micro.batch["input_ids"].tolist() for micro in whole.step(plan, 1)]
    state = whole.state_dict()
    expected = [m.batch["input_ids"].tolist() for _ in range(3) for m in whole.step(plan, 1)]
    again = bb.Batches(loader, packed=True)
    again.load_state_dict(state, 0)
    resumed = [m.batch["input_ids"].tolist() for _ in range(3) for m in again.step(plan, 1)]
    assert resumed == expected
    assert first == [[[0, 1, 2]], [[3]]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(1, 4), "is a Tensor"),
        ({"input_ids": torch.zeros(1, 4)}, "does not say where its sequences begin"),
        (row([2, 2]) | {"extra": torch.zeros(2)}, r"extra is \(2,\)"),
        (row([2, 2]) | {"extra": "text"}, "extra is str"),
        (row([2, 2]) | {"cu_seq_lens_k": torch.tensor([0, 1, 4])}, "must be the same"),
        ({"input_ids": torch.zeros(1, 4), "cu_seqlens": torch.tensor([0, 2])}, r"\(1, 4\)"),
        ({"input_ids": torch.zeros(1, 4), "cu_seqlens": torch.tensor([0, 4, 4])}, "and rise"),
        ({"input_ids": torch.zeros(1, 4), "cu_seqlens": torch.tensor([1, 4])}, "begin with 0"),
    ],
)
def test_what_is_no_packed_batch_is_refused_by_name(batch, message):
    with pytest.raises(BatchError, match=message):
        unpack(batch)


def test_packed_rows_are_not_taken_for_one_sample():
    for boundaries in (True, False):
        batches = bb.Batches([row([3, 4], boundaries=boundaries)])
        batches.start(0)
        with pytest.raises(BatchError, match="packed=True"):
            next(iter(batches.step(bb.BatchPlan(1, 1, 1), 1)))
    assert not is_packed({"input_ids": torch.zeros(1, 4), "position_ids": torch.arange(4)[None]})
    assert not is_packed({"position_ids": torch.arange(4).repeat(2, 1)})


@pytest.mark.parametrize("options", [{"packed": True}, {"unit": "tokens"}])
def test_options_that_exclude_each_other_are_refused(options):
    with pytest.raises(SettingError, match="split= cuts batches its own way"):
        bb.Batches([], split=lambda batch, lo, hi: batch, count=len, **options)


def test_a_padded_sample_is_not_packed_though_its_positions_start_again():
    mask = torch.tensor([[0, 0, 1, 1, 1]])  # as generate() numbers what is padded on the left
    padded = {"input_ids": mask, "position_ids": torch.tensor([[1, 1, 0, 1, 2]])}
    assert is_packed(padded)
    assert is_packed(padded | {"attention_mask": torch.ones(1, 5)})
    assert not is_packed(padded | {"attention_mask": mask})
    batches = bb.Batches([padded | {"attention_mask": mask}])
    batches.start(0)
    (micro_batch,) = batches.step(bb.BatchPlan(1, 1, 1), 1)
    assert micro_batch.samples == 1


def test_boundaries_that_are_none_are_not_stated():
    batch = row([3, 4], boundaries=False) | {"cu_seq_lens_q": None}
    assert is_packed(batch)
    assert [sequence.length for sequence in unpack(batch)] == [3, 4]
    assert pack(unpack(batch))["cu_seq_lens_q"] is None
    assert not is_packed({"input_ids": torch.zeros(1, 4), "cu_seq_lens_q": None})


def test_rows_that_the_data_set_has_packed_are_passed_in_tokens_alone():
    data = [row([3, 4], boundaries=False), row([2, 2, 3], boundaries=False)]
    loader = DataLoader(data, batch_size=1, collate_fn=lambda rows: rows[0])
    batches = bb.Batches(loader, packed=True)
    batches.start(0)
    with pytest.raises(BatchError, match='state Batches\\(loader, packed=True, unit="tokens"\\)'):
        list(batches.step(bb.BatchPlan(1, 2, 1), 1))
    batches = bb.Batches(loader, packed=True, unit="tokens")
    batches.start(0)
    steps = [batches.step(bb.BatchPlan(1, 7, 1), 1) for _ in data]
    assert [micro_batch.samples for step in steps for micro_batch in step] == [7, 7]
