"""Steps planned in tokens: whole samples, near the plan, within the bound of memory."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.data.collate import token_lengths
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import BatchError, SettingError, StateError
from property_tests import property_test


def rows(lengths, per_row):
    """Packed batches of numbered tokens, `per_row` sequences in each."""
    ends = [*accumulate(lengths, initial=0)]
    made = []
    for start in range(0, len(lengths), per_row):
        of_row = lengths[start : start + per_row]
        tokens = torch.arange(ends[start], ends[start] + sum(of_row))[None]
        bounds = torch.tensor([0, *accumulate(of_row)])
        made.append({"input_ids": tokens, "cu_seqlens": bounds})
    return made


def passed(batches, plan, max_micro=None, min_rows=1):
    """The micro-batches of a pass, by step: their batches and sizes."""
    steps = []
    while step := batches.step(plan, 1, min_rows=min_rows, max_micro=max_micro):
        steps.append([(micro.batch, micro.samples) for micro in step])
    return steps


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(5, 80),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 2),
)
@property_test(150)
def test_every_sequence_comes_once_in_steps_near_their_plan(
    lengths, per_row, micro, accumulation, room, min_rows
):
    batches = bb.Batches(rows(lengths, per_row), packed=True, unit="tokens")
    batches.start(0)
    accumulation = max(accumulation, min_rows)  # as the plans of every step have it
    plan, most = bb.BatchPlan(1, micro, accumulation), micro + room
    steps = passed(batches, plan, most, min_rows)
    seen = [t for step in steps for batch, _ in step for t in batch["input_ids"][0].tolist()]
    assert seen == list(range(sum(lengths)))
    longest = max(lengths)
    for number, step in enumerate(steps):
        for batch, tokens in step:
            assert tokens == batch["input_ids"].shape[1]
            assert tokens <= most or len(batch["cu_seqlens"]) == 2  # one sample alone
        total = sum(tokens for _, tokens in step)
        is_last = number >= len(steps) - 2
        assert len(step) == accumulation or is_last
        if not is_last and longest <= micro <= most - longest:  # the bound never decides
            assert abs(total - plan.batch_size) <= longest / 2
    if len(lengths) >= min_rows:
        assert all(len(step) >= min_rows for step in steps)


def test_a_step_is_nearest_to_its_plan_though_no_micro_batch_is_exact():
    batches = bb.Batches(rows([10] * 40, 4), packed=True, unit="tokens")
    batches.start(0)
    steps = passed(batches, bb.BatchPlan(1, 24, 4), 40)
    sizes = [[tokens for _, tokens in step] for step in steps]
    assert sizes[0] == [20, 30, 20, 30]  # 24, 48, 72 and 96 of the plan
    assert sum(map(sum, sizes)) == 400


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        ({"input_ids": torch.zeros(3, 5), "attention_mask": torch.ones(3, 5).tril(1)}, [2, 3, 4]),
        ({"input_ids": torch.zeros(3, 5)}, [5, 5, 5]),
        ((torch.zeros(2, 7), torch.zeros(2)), [7, 7]),
        ({"x": torch.zeros(2, 7, 3)}, [7, 7]),
        ({"input_ids": torch.zeros(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)}, [5, 5]),
    ],
)
def test_tokens_of_padded_batches_are_those_of_the_mask_or_all(batch, lengths):
    assert token_lengths(batch) == lengths


@pytest.mark.parametrize("batch", [torch.zeros(4), {"name": ["a", "b"]}])
def test_a_batch_without_tokens_is_refused(batch):
    batches = bb.Batches([batch], unit="tokens")
    batches.start(0)
    with pytest.raises(BatchError, match=r"\(samples, tokens\)"):
        batches.step(bb.BatchPlan(1, 4, 1), 1)


def test_a_sample_of_padding_alone_is_refused():
    batch = {"input_ids": torch.zeros(1, 3), "attention_mask": torch.zeros(1, 3)}
    batches = bb.Batches([batch], unit="tokens")
    batches.start(0)
    with pytest.raises(BatchError, match="is padding"):
        passed(batches, bb.BatchPlan(1, 4, 1))


def padded(lengths):
    """A batch of each two samples, padded to the longer one."""
    made = []
    for pair in zip(lengths[::2], lengths[1::2], strict=True):
        mask = torch.arange(max(pair)) < torch.tensor(pair)[:, None]
        made.append({"input_ids": mask.long(), "attention_mask": mask.long()})
    return made


def test_a_step_has_its_tokens_though_no_two_batches_can_be_joined():
    lengths = [5, 3, 8, 2, 9, 4, 7, 6, 1, 5, 3, 2] * 6
    batches = bb.Batches(padded(lengths), unit="tokens")
    batches.start(0)
    steps = passed(batches, bb.BatchPlan(1, 50, 2), 50)
    sizes = [sum(tokens for _, tokens in step) for step in steps]
    assert sum(sizes) == sum(lengths)
    assert all(abs(size - 100) <= max(lengths) / 2 for size in sizes[:-1])


def test_batches_that_cannot_be_joined_are_refused_in_lockstep():
    batches = bb.Batches(padded([5, 3, 8, 2, 9, 4]), unit="tokens")
    batches.share(HostCollectives(), lockstep=True)
    batches.start(0)
    with pytest.raises(BatchError, match="pad them to one length"):
        passed(batches, bb.BatchPlan(1, 20, 1))


def test_a_pass_resumes_with_the_next_sequence():
    data = [torch.full((n,), n) for n in (5, 3, 8, 2, 9, 4, 7, 6, 1, 5, 3, 8)]

    def collate(sequences):
        bounds = torch.tensor([0, *accumulate(map(len, sequences))])
        return {"input_ids": torch.cat(sequences)[None], "cu_seqlens": bounds}

    def batches():
        loader = DataLoader(data, batch_size=3, shuffle=True, collate_fn=collate)
        return bb.Batches(loader, packed=True, unit="tokens")

    plan = bb.BatchPlan(1, 7, 2)
    torch.manual_seed(0)
    whole = batches()
    whole.start(0)
    list(whole.step(plan, 1))
    state = whole.state_dict()
    expected = [[batch["input_ids"].tolist() for batch, _ in s] for s in passed(whole, plan)]
    again = batches()
    again.load_state_dict(state, 0)
    resumed = [[batch["input_ids"].tolist() for batch, _ in s] for s in passed(again, plan)]
    assert resumed == expected
    assert len(expected) > 2
    with pytest.raises(StateError, match='resume with Batches\\(unit="tokens"\\)'):
        bb.Batches([torch.zeros(2, 3)]).load_state_dict(state, 0)
    with pytest.raises(StateError, match="as many ranks as it began with"):
        batches().load_state_dict(state, 0, same_rank=False)


def test_a_pass_that_is_shorter_than_a_step_decides_and_the_end_of_a_longer_one_does_not():
    found = {}
    for sequences in (6, 9):
        batches = bb.Batches(rows([10] * sequences, 3), packed=True, unit="tokens")
        plan, found[sequences] = bb.BatchPlan(1, 20, 4), []
        for epoch in range(2):
            batches.start(epoch)
            while step := batches.step(plan, 1):
                tokens = sum(micro.samples for micro in step)
                found[sequences].append((tokens, batches.is_complete(tokens, plan)))
    assert found == {6: [(60, True)] * 2, 9: [(80, True), (10, False)] * 2}


def test_drop_leaves_out_a_step_that_is_not_whole():
    kept = {}
    for remainder in ("share", "drop"):
        batches = bb.Batches(rows([10] * 9, 3), packed=True, unit="tokens", remainder=remainder)
        batches.start(0)
        kept[remainder] = [len(step) for step in passed(batches, bb.BatchPlan(1, 20, 2))]
    assert kept == {"share": [2, 2, 1], "drop": [2, 2]}


def test_a_function_that_draws_batches_is_asked_for_no_more_than_a_micro_batch():
    drawn = []

    def draw():
        drawn.append(len(drawn))
        return {"input_ids": torch.zeros(2, 10)}

    batches = bb.Batches(draw, unit="tokens")
    batches.start(0)
    counts = [len(drawn) for _ in batches.step(bb.BatchPlan(1, 20, 3), 1)]
    assert all(after - before <= 2 for before, after in pairwise([0, *counts]))


def test_ranks_of_one_process_take_no_tokens_in_turn():
    with pytest.raises(SettingError, match="virtual_ranks= deals single samples"):
        bb.Batches([], unit="tokens", virtual_ranks=2)
