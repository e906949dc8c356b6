"""Trainings on ranks through torch.distributed.checkpoint: on as many ranks, on more, on one."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bigbatch as bb
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import LoopError, StateError
from bigbatch.optim import VRAdam
from numbered_samples import (
    SAMPLES,
    SEED,
    Numbered,
    controller_of,
    steps_of,
    together,
    whole,
    wrapped,
)

VIRTUAL = 4
BEFORE, AFTER = 9, 14  # updates; an epoch ends in the second part


class Augmented(Numbered):
    """Every sample comes with noise of this rank's own."""

    def __getitem__(self, number):
        x, y, _ = super().__getitem__(number)
        return x + 1e-3 * torch.randn(5, dtype=torch.float64), y, number


def build(rank, ranks, engine, *, noisy):
    """A training; with `noisy` samples that another number of ranks cannot draw again."""
    engine, _, reduced = engine.partition(" ")
    torch.manual_seed(100 + rank)
    data = (Augmented if noisy else Numbered)(SAMPLES)
    sampler = bb.ElasticDistributedSampler(data, seed=SEED, num_replicas=ranks, rank=rank)
    loader = torch.utils.data.DataLoader(data, 16, sampler=sampler)
    model = wrapped(engine, ranks)
    torch.manual_seed(100 + rank)  # after the weights
    make = VRAdam if reduced else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=0.02)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        bb.Batches(loader, virtual_ranks=VIRTUAL),
        policy=controller_of(),
        micro_batch=12,
        every=1,
    )
    train.scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.04, total_steps=train.base_steps(6)
    )
    return train


def go_on(train, updates):
    """(numbers of the samples on this rank, record) of each step."""
    return steps_of(train, 10**9, updates)


def everything(train):
    """As the README says."""
    if getattr(train.optimizer, "attached", None):
        train.optimizer.attached.consolidate()
    model, optimizer = get_state_dict(train.model, train.optimizer)
    return {"model": model, "optimizer": optimizer, "train": bb.DistributedState(train)}


def answer(done, train):
    return (
        [numbers for numbers, _ in done],
        [(r.batch_size, r.decision.batch_size, r.lr, r.loss) for _, r in done],
        [whole(p) for p in train.model.parameters()],
    )


def saved(rank, ranks, engine, folder, way, noisy):
    """Trains, saves, and trains on, as if nothing had been saved."""
    train = build(rank, ranks, engine, noisy=noisy)
    go_on(train, BEFORE)
    if way == "async":
        group = dist.new_group(backend="gloo")  # DCP's thread and the training share none
        writing = dcp.async_save(everything(train), checkpoint_id=folder, process_group=group)
        done = go_on(train, AFTER)  # meanwhile
        writing.result()
    else:
        dcp.save(everything(train), checkpoint_id=folder)
        done = go_on(train, AFTER)
    return answer(done, train)


def resumed(rank, ranks, engine, folder, noisy):
    train = build(rank, ranks, engine, noisy=noisy)
    torch.manual_seed(999)  # nothing hangs on what stands here
    state = everything(train)
    with warnings.catch_warnings(record=True, action="always") as caught:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        train.model,
        train.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return answer(go_on(train, AFTER), train), [str(w.message) for w in caught]


def on(ranks, count):
    """The function on so many ranks; one is this process."""
    return ranks(count) if count > 1 else lambda run, *how: [run(0, 1, *how)]


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        ("ddp", "sync"),
        ("ddp", "async"),
        ("fsdp2", "sync"),
        ("fsdp2", "async"),
        ("fsdp2 reduced", "sync"),
    ],
)
def test_a_training_continues_bit_for_bit_on_as_many_ranks(ranks, tmp_path, engine, way):
    expected = ranks(2)(saved, engine, tmp_path, way, True)
    for one, (other, messages) in zip(
        expected, ranks(2)(resumed, engine, tmp_path, True), strict=True
    ):
        assert one[:2] == other[:2]
        assert all(map(torch.equal, one[2], other[2]))
        assert not any("random states" in each for each in messages)


def test_vr_under_ddp_continues_up_to_rounding_since_a_new_process_has_other_buckets(
    ranks, tmp_path
):
    expected = ranks(2)(saved, "ddp reduced", tmp_path, "async", True)
    found = ranks(2)(resumed, "ddp reduced", tmp_path, True)
    for one, (other, messages) in zip(expected, found, strict=True):
        assert one[0] == other[0]
        assert [row[:3] for row in one[1]] == [row[:3] for row in other[1]]
        losses = [[row[3] for row in answer[1]] for answer in (one, other)]
        assert pytest.approx(losses[0], rel=1e-12) == losses[1]
        for weights, again in zip(one[2], other[2], strict=True):
            torch.testing.assert_close(weights, again, rtol=1e-10, atol=1e-12)
        assert not any("random states" in each for each in messages)


@pytest.mark.parametrize(
    ("engine", "way", "after", "count"),
    [
        ("ddp", "sync", "fsdp2", 4),
        ("fsdp2", "async", "plain", 1),
        ("ddp reduced", "sync", "plain reduced", 1),
        ("ddp reduced", "async", "ddp reduced", 4),
    ],
)
def test_a_training_of_two_ranks_continues_with_the_same_samples_and_batches_on_others(
    ranks, tmp_path, engine, way, after, count
):
    first = ranks(2)(saved, engine, tmp_path, way, False)
    answers = on(ranks, count)(resumed, after, tmp_path, False)
    assert together(first) == together([other for other, _ in answers])
    for other, _ in answers:
        for one, two in zip(first[0][1], other[1], strict=True):
            assert one[:2] == two[:2]
            assert pytest.approx(one[2], rel=1e-12) == two[2]
            assert pytest.approx(one[3], rel=1e-9) == two[3]
        torch.testing.assert_close(first[0][2], other[2], rtol=1e-8, atol=1e-10)
    messages = [each for _, messages in answers for each in messages if "random states" in each]
    assert 1 == len(messages)


def inside_a_step(rank, ranks):
    train = build(rank, ranks, "ddp", noisy=False)
    states = bb.DistributedState(train)
    before = states.state_dict()
    step = next(iter(train))
    next(iter(step))
    with pytest.raises(LoopError, match="was not called for the last step"):
        states.state_dict()
    return before


def test_the_states_are_equal_on_all_ranks_and_refused_inside_a_step(ranks):
    one, other = ranks(2)(inside_a_step)
    assert one == other


@pytest.mark.parametrize("state", [{}, {"version": 2, "shared": {}, "own": {}}, {"ranks": None}])
def test_a_state_that_is_none_of_all_ranks_is_refused_by_what_is_in_it(state):
    train = build(0, 1, "plain", noisy=False)
    with pytest.raises(StateError, match="is not one of DistributedState"):
        bb.DistributedState(train).load_state_dict(state)


def bytes_of_all(rank, ranks):
    """A rank's own bytes, the second more of them, and what comes of all."""
    data = torch.arange(251 - rank, 254 + rank, dtype=torch.uint8)
    agreement = HostCollectives(build(rank, ranks, "ddp", noisy=False).meter.source)
    return data.tolist(), [row.tolist() for row in agreement.all_gather_bytes(data)]


def test_bytes_in_any_number_come_to_all_ranks_as_they_are(ranks):
    (first, own_bytes), (second, other_bytes) = ranks(2)(bytes_of_all)
    assert (3, 5) == (len(first), len(second))
    assert [first, second] == own_bytes == other_bytes
