"""What is read back from disk is what was written, or refused in one sentence."""

import io
import zipfile

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import bigbatch as bb
from bigbatch.digest import load_state, save_state
from bigbatch.errors import StateError
from numbered_samples import build
from property_tests import property_test

STATE = {"model": {"w": torch.arange(40.0).reshape(8, 5)}, "train": [{"counts": [1, 2.5, "x"]}]}


def saved(state=STATE):
    file = io.BytesIO()
    save_state(state, file)
    return file.getvalue()


WHOLE = saved()
with zipfile.ZipFile(io.BytesIO(WHOLE)) as _members:
    # torch aligns tensors to 64 bytes: what fills the gaps before them no checksum of zip covers
    PADDING = next(m.header_offset for m in _members.infolist() if m.filename.endswith("data/0"))


def loaded(data):
    return load_state(io.BytesIO(data), "checkpoint.pt")


def test_a_state_comes_back_as_it_was():
    found = loaded(WHOLE)
    assert torch.equal(STATE["model"]["w"], found["model"]["w"])
    assert STATE["train"] == found["train"]


def test_torch_loads_the_file_by_itself_too(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(WHOLE)
    for mmap in (False, True):
        found = torch.load(tmp_path / "checkpoint.pt", weights_only=True, mmap=mmap)
        assert torch.equal(STATE["model"]["w"], found["model"]["w"])


@given(st.integers(0, 8 * len(WHOLE) - 1))
@example(0)
@example(8 * (PADDING + 40))
@example(8 * (len(WHOLE) - 48))  # of the mark
@example(8 * len(WHOLE) - 1)  # of the digest
@property_test(2_000)
def test_every_bit_that_flips_is_refused(bit):
    flipped = bytearray(WHOLE)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StateError, match=r"checkpoint.pt (is damaged|does not end with a digest)"):
        loaded(flipped)


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=100))
@example(0, b"")
@property_test(500)
def test_what_is_cut_short_or_continues_is_refused(length, more):
    for other in (WHOLE[:length], WHOLE + more + b"\0", WHOLE[:length] + more):
        if other != WHOLE:
            with pytest.raises(StateError, match=r"is damaged|does not end with a digest"):
                loaded(other)


def test_a_checkpoint_of_torch_alone_is_refused():
    """A cut file has no digest either, so one without is never believed."""
    file = io.BytesIO()
    torch.save(STATE, file)
    with pytest.raises(StateError, match="does not end with a digest"):
        load_state(file, "checkpoint.pt")


def flip_one_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(data)


def test_a_damaged_state_of_all_ranks_is_refused():
    states = bb.DistributedState(build(0, 1, "plain", 4))
    packed = bytearray(states.state_dict()["ranks"])
    packed[len(packed) // 2] ^= 1
    with pytest.raises(StateError, match="the state of DistributedState is damaged"):
        states.load_state_dict({"ranks": bytes(packed)})


def test_a_damaged_state_in_a_checkpoint_of_transformers_is_refused(tmp_path):
    trainer = pytest.importorskip("bigbatch.integrations.transformers.trainer")
    trainer.save_rank_state(tmp_path, 0, 3, {"counts": [1, 2]})
    assert (3, {"counts": [1, 2]}) == trainer.load_rank_state(tmp_path, 0)
    flip_one_bit(tmp_path / "adaptive_batch_0.pt")
    with pytest.raises(StateError, match=r"adaptive_batch_0.pt is damaged"):
        trainer.load_rank_state(tmp_path, 0)
