"""One rank's samples of a pass, in the loader's order, to be taken in any number."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bigbatch.data.collate import (
    Batch,
    concatenate_samples,
    count_samples,
    interleave_samples,
    slice_samples,
)
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.rng_state import RandomReader, RandomState, restorable, restore_random_state
from bigbatch.errors import SettingError, StateError


class SampleBuffer:
    """Fetches the loader's batches as they are needed and cuts them to size.

    What is fetched and not taken waits; nothing is thrown away. Cutting makes views; samples are
    copied, once, only where a batch spans two of the loader's batches or is interleaved.

    Args:
        loader: gives the batches.
        split: (batch, lo, hi) -> samples lo to hi; such batches are not glued.
        count: batch -> number of samples, with `split`; default: by the known length.
    Raises:
        SettingError: a number of samples that nobody says.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        split: Callable[[Batch, int, int], Batch] | None = None,
        count: Callable[[Batch], int] | None = None,
    ) -> None:
        self.loader = loader
        self.counted = 0  # samples fetched in this pass
        self.waiting = 0  # of them, not taken yet
        self.ended = False  # the loader has no more
        self.as_said = True  # batches are as large as the loader says
        self._jumped = False  # whether the pass cannot be replayed from its start
        self._random = RandomReader()
        self._said: tuple[int | None, int | None] = (None, None)  # sizes of a batch and of the pass
        self._iterator: Iterator[Batch] | None = None
        self._fetched = 0  # batches
        self._chunks: deque[_Chunk] = deque()
        self._split = split or slice_samples
        self._count = count or (count_samples if split is None else self._count_by_length)
        self._count_is_known = count is not None
        self.glues = split is None
        if split is not None and count is None and None in (loader.batch_size, loader.length):
            raise SettingError("split= needs count= where the loader does not say its sizes")

    @property
    def open(self) -> bool:
        """Whether a pass has begun and was not closed."""
        return self._iterator is not None

    def begin(self, epoch: int) -> None:
        """Begins a pass."""
        self._start(self.loader.begin(epoch))

    def close(self) -> None:
        """Ends the pass."""
        self._iterator = None
        self._chunks.clear()
        self.waiting = self._fetched = 0

    def read_until(self, samples: int) -> None:
        """Fetches batches until so many samples wait, or the loader ends."""
        while self.waiting < samples and not self.ended:
            self.ended = not self._fetch()

    def take(self, samples: int, turns: int = 1) -> tuple[list[Batch], int]:
        """The next `samples` samples, assigned in turn to so many batches, and how many they are.

        Fewer where they cannot be glued, or are not there; then nothing waits any more.
        """
        self.read_until(samples)
        parts: list[_Chunk] = []
        missing = min(samples, self.waiting)
        while missing:
            chunk = self._chunks.popleft()
            if chunk.samples > missing:
                chunk, rest = self._cut(chunk, missing)
                self._chunks.appendleft(rest)
            if chunk.samples:
                parts.append(chunk)
            missing -= chunk.samples
        if not parts:
            return [], 0
        batches = self._interleaved(parts, turns)
        if batches is None:
            self._chunks.extendleft(reversed(parts[1:]))
            parts = parts[:1]
            batches = self._interleaved(parts, turns)
            assert batches is not None
        taken = sum(part.samples for part in parts)
        self.waiting -= taken
        return batches, taken

    def _interleaved(self, parts: list["_Chunk"], turns: int) -> list[Batch] | None:
        """Parts in one batch for each turn; None where they do not fit together."""
        batches = [part.batch for part in parts]
        if turns > 1:
            return interleave_samples(batches, [part.samples for part in parts], turns)
        if len(parts) > 1 and not self.glues:
            return None
        glued = concatenate_samples(batches)
        return None if glued is None else [glued]

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's pass stands: what was fetched, what waits, how it was shuffled.

        No sample is saved: those that wait are fetched again, from the random states that they
        were fetched with.
        """
        first = self._chunks[0] if self._chunks else None
        waiting = {chunk.number: chunk.fetched_from for chunk in self._chunks}
        own = self.loader.own_state() if self.open else None
        return {
            "loader": self.loader.state_dict(),
            "batch_size": self.loader.batch_size,
            "own": own if first is None else first.own,
            "batches": self._fetched if first is None else first.number,
            "samples": self.counted - self.waiting - (0 if first is None else first.start),
            "given_out": 0 if first is None else first.start,
            "fetched_from": [restorable(state) for state in waiting.values()],
            "ended": self.ended,
            "as_said": self.as_said,
            "jumped": self._jumped,
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Resumes in the middle of a pass, with the samples that waited.

        Raises:
            StateError: the loader is not the one of the state.
        """
        position = state["samples"] if state["as_said"] else None
        iterator, at_position = self.loader.resume(state["loader"], epoch, position, state["own"])
        self._start(iterator)
        other = state["batch_size"] != self.loader.batch_size  # so batches are not what they were
        self._jumped = state["jumped"] or (at_position and other)
        if at_position:
            self._fetched, self.counted = state["batches"], state["samples"]
        if other:
            self._throw_away(state["given_out"] + (0 if at_position else state["samples"]))
            self.loader.restore_generators(state["loader"]["generators"])
            return
        before = torch.get_rng_state()
        needed = state["batches"] + len(state["fetched_from"])
        while self._fetched < state["batches"]:
            self._fetch_again(needed)
            self.waiting -= self._chunks.pop().samples
        if not torch.equal(before, torch.get_rng_state()):
            self.loader.warn_of_draws()
        for fetched_from in state["fetched_from"]:
            restore_random_state(fetched_from)
            self._fetch_again(needed)
        self._throw_away(state["given_out"])
        self.ended = state["ended"]
        self.loader.restore_generators(state["loader"]["generators"])

    def skip(self, epoch: int, position: int, samples: int) -> None:
        """Resumes after so many of this rank's samples, at a position of the order of all ranks."""
        if self.loader.ledger is not None:
            self._start(self.loader.begin(epoch, position))
            self.counted, self._jumped = samples, True
        else:
            self._start(self.loader.begin(epoch))
            self._throw_away(samples)

    def _start(self, iterator: Iterator[Batch]) -> None:
        self.close()
        self.counted, self.ended, self.as_said, self._jumped = 0, False, True, False
        self._said = self.loader.batch_size, self.loader.length
        self._iterator = iterator

    def _throw_away(self, samples: int) -> None:
        """What was given out already."""
        while samples:
            if not self._chunks:
                self._fetch_again(self._fetched + 1)
            head = self._chunks.popleft()
            gone = min(samples, head.samples)
            if gone < head.samples:
                self._chunks.appendleft(self._cut(head, gone)[1])
            self.waiting -= gone
            samples -= gone

    def _fetch_again(self, needed: int) -> None:
        if not self._fetch():
            raise StateError(
                f"the loader has only {self._fetched} batches, the saved one had at least "
                f"{needed}; resume with the same data and batch size"
            )

    def _fetch(self) -> bool:
        """Takes one batch from the loader; False where there is none."""
        assert self._iterator is not None
        fetched_from, own = self._random.read(), self.loader.own_state()
        try:
            batch = next(self._iterator)
        except StopIteration:
            return False
        samples = self._count(batch)
        if self._fetched == 0 and not self._count_is_known:
            self.loader.require_samples(samples, self.counted)
        size, length = self._said
        if size and length is not None and samples != min(size, length - self.counted):
            self.as_said = False
        self._chunks.append(_Chunk(batch, samples, 0, self._fetched, fetched_from, own))
        self._fetched += 1
        self.counted += samples
        self.waiting += samples
        return True

    def _cut(self, chunk: "_Chunk", samples: int) -> tuple["_Chunk", "_Chunk"]:
        head = self._split(chunk.batch, 0, samples)
        rest = self._split(chunk.batch, samples, chunk.samples)
        left, start = chunk.samples - samples, chunk.start + samples
        return (
            chunk._replace(batch=head, samples=samples),
            chunk._replace(batch=rest, samples=left, start=start),
        )

    def _count_by_length(self, batch: Batch) -> int:
        """Full batches, and a last one of what is left of the known length."""
        assert self.loader.batch_size is not None
        assert self.loader.length is not None
        return min(self.loader.batch_size, self.loader.length - self.counted)


class _Chunk(NamedTuple):
    """A batch of the loader, or what is left of it."""

    batch: Batch
    samples: int
    start: int  # samples of the loader's batch that were before it
    number: int  # which one of the pass it was
    fetched_from: RandomState  # random states before it was fetched
    own: dict[str, Any] | None  # the loader's own state before that
