"""One rank's samples of a pass, in the loader's order, taken in any number."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bigbatch.data.batch_memory import BatchMemory
from bigbatch.data.collate import (
    REMEDY,
    Batch,
    concatenate_samples,
    copy_batch,
    copy_samples,
    count_samples,
    interleave_samples,
    mark_constants,
    slice_samples,
    token_lengths,
    unmark_constants,
)
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.packed_sequences import Packed, pack, unpack
from bigbatch.data.rng_state import RandomReader, RandomState, restorable, restore_random_state
from bigbatch.errors import StateError

_PACKED_BEFORE = (
    "rows that the data set has packed count as one each in the loader's length, so state "
    'Batches(loader, packed=True, unit="tokens"), which needs no length, or pack in the collate '
    "function"
)


class SampleBuffer:
    """Fetches the loader's batches as they are needed and cuts them to size.

    What is fetched and not taken waits; nothing is thrown away. Cutting makes views; samples are
    copied, once, only if a batch spans two of the loader's batches or is interleaved, and where the
    loader reuses its memory.

    Args:
        loader: gives the batches.
        split: (batch, lo, hi) -> samples lo to hi; such batches are not concatenated.
        count: batch -> number of samples, with `split`.
        packed: whether batches are packed sequences, which are the samples.
        counts_samples: whether the loader's length has to be a number of samples.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        split: Callable[[Batch, int, int], Batch] | None = None,
        count: Callable[[Batch], int] | None = None,
        *,
        packed: bool = False,
        counts_samples: bool = True,
    ) -> None:
        self.loader = loader
        self.place: Callable[[Batch], Batch] | None = None  # moves a batch that is given out
        self.counted = 0  # samples fetched in this pass
        self.waiting = 0  # of them, not taken yet
        self.ended = False  # the loader has no more
        self.has_stated_sizes = True  # batches are as large as the loader says
        self._skipped = False  # whether the pass cannot be replayed from its start
        self._random = RandomReader()
        self._iterator: Iterator[Batch] | None = None
        self._fetched = 0  # batches
        self._chunks: deque[_Chunk] = deque()
        self._split = split or slice_samples
        self._count = count or (len if packed else count_samples)
        self._packed = packed
        self.concatenates = split is None
        self._requires_size = counts_samples and self.concatenates
        self._memory = BatchMemory()
        self._memory.examined = packed or not self.concatenates

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

    def read_until(self, samples: int, *, notes_end: bool = True) -> None:
        """Fetches batches until so many samples wait, or the loader ends.

        An end that is not noted becomes known when it would have been, so steps are cut alike.
        """
        has_more = not self.ended
        while self.waiting < samples and has_more:
            has_more = self._fetch()
        self.ended = self.ended or (notes_end and not has_more)

    def examine(self, samples: int) -> None:
        """Fetches a second batch if the first is to be cut; two show which leaves are constant."""
        known = self._memory.examined or self._gives_new_memory
        if not known and self._chunks and self._chunks[0].samples > samples:
            self._fetch()

    def peek(self, start: int, stop: int) -> list[tuple[Batch, int]]:
        """Copies of the samples `start` to `stop` of those that wait, with their numbers.

        They still wait afterwards. Several batches if they cannot be concatenated.
        """
        parts = []
        for chunk in self._chunks:
            low, high = max(0, start), min(stop, chunk.samples)
            if low < high:
                parts.append((self._split(chunk.batch, low, high), high - low))
            start, stop = start - chunk.samples, stop - chunk.samples
        joined = copy_samples([batch for batch, _ in parts]) if self.concatenates else None
        if joined is not None:
            return [(self._placed(joined), sum(n for _, n in parts))]
        return [(self._placed(copy_batch(batch)), n) for batch, n in parts]

    def take(self, samples: int, turns: int = 1) -> tuple[list[Batch], int]:
        """The next `samples` samples, assigned in turn to `turns` batches, and their number.

        Fewer if they cannot be concatenated, or the loader has no more; then no sample waits.
        """
        self.read_until(samples)
        self.examine(samples if turns == 1 else 0)
        chunks: list[_Chunk] = []
        missing = samples if samples < self.waiting else self.waiting
        while missing:
            chunk = self._chunks.popleft()
            if chunk.samples > missing:
                chunk, rest = self._cut(chunk, missing)
                self._chunks.appendleft(rest)
            if chunk.samples:
                chunks.append(chunk)
            missing -= chunk.samples
        if not chunks:
            return [], 0
        batches = self._join(chunks, turns)
        if batches is None:
            self._chunks.extendleft(reversed(chunks[1:]))
            chunks = chunks[:1]
            batches = self._join(chunks, turns)
            assert batches is not None
        count = sum([chunk.samples for chunk in chunks])
        self.waiting -= count
        if self.place is not None or self._packed or self._memory.constants:
            batches = list(map(self._placed, batches))
        return batches, count

    def token_lengths(self, tokens: int, samples: int) -> list[int]:
        """Tokens of each sample that waits, in order; fetches until so many of both wait."""
        lengths = [n for chunk in self._chunks for n in token_lengths(chunk.batch)]
        total = sum(lengths)
        while (total < tokens or len(lengths) < samples) and not self.ended:
            self.read_until(self.waiting + 1)
            if not self.ended:
                new = token_lengths(self._chunks[-1].batch)
                lengths += new
                total += sum(new)
        return lengths

    def _placed(self, batch: Batch) -> Batch:
        if isinstance(batch, Packed):
            batch = pack(batch)
        if self._memory.constants:
            batch = unmark_constants(batch)
        return batch if self.place is None else self.place(batch)

    def _join(self, chunks: list["_Chunk"], turns: int) -> list[Batch] | None:
        """The chunks as one batch for each turn; None if they do not fit together."""
        if turns == 1 == len(chunks):
            return [chunks[0].batch]
        batches = [chunk.batch for chunk in chunks]
        if turns > 1:
            return interleave_samples(batches, [chunk.samples for chunk in chunks], turns)
        if len(chunks) > 1 and not self.concatenates:
            return None
        batch = concatenate_samples(batches)
        return None if batch is None else [batch]

    def state_dict(self) -> dict[str, Any]:
        """The position in this rank's pass: fetched batches, waiting samples, random states.

        No sample is saved: waiting samples are fetched again, from the random states that they
        were fetched with.
        """
        first = self._chunks[0] if self._chunks else None
        random_states = {chunk.number: chunk.random_state for chunk in self._chunks}
        loader_state = self.loader.loader_state() if self.open else None
        start = 0 if first is None else first.start
        return {
            "loader": self.loader.state_dict(),
            "batch_size": self.loader.batch_size,
            "own": loader_state if first is None else first.loader_state,
            "batches": self._fetched if first is None else first.number,
            "samples": self.counted - self.waiting - start,
            "given_out": start,
            "fetched_from": [restorable(state) for state in random_states.values()],
            "ended": self.ended,
            "as_said": self.has_stated_sizes,
            "jumped": self._skipped,
            "constants": sorted(self._memory.constants) if self._memory.examined else None,
        }

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Resumes in the middle of a pass, with the samples that waited."""
        position = state["samples"] if state["as_said"] else None
        iterator, at_position = self.loader.resume(state["loader"], epoch, position, state["own"])
        self._start(iterator)
        if (constants := state.get("constants")) is not None:
            self._memory.examined, self._memory.constants = True, set(map(str, constants))
        is_resized = state["batch_size"] != self.loader.batch_size  # batches are other ones
        self._skipped = state["jumped"] or (at_position and is_resized)
        if at_position:
            self._fetched, self.counted = state["batches"], state["samples"]
        if is_resized:
            self._discard(state["given_out"] + (0 if at_position else state["samples"]))
        else:
            self._replay(state)
        self.loader.restore_generators(state["loader"]["generators"])

    def _replay(self, state: dict[str, Any]) -> None:
        """Fetches again what was fetched before the state was saved."""
        needed, iterator = state["batches"] + len(state["fetched_from"]), self._iterator
        with self.loader.watch_draws(iterator) as self._iterator:
            while self._fetched < state["batches"]:
                self._refetch(needed)
                self.waiting -= self._chunks.pop().samples
        self._iterator = iterator
        for random_state in state["fetched_from"]:
            restore_random_state(random_state)
            self._refetch(needed)
            self.loader.warn_of_position(random_state)
        self._discard(state["given_out"])
        self.ended = state["ended"]

    def skip(self, epoch: int, position: int, samples: int) -> None:
        """Resumes after so many of this rank's samples, at a position of the order of all ranks."""
        self._start(self.loader.begin(epoch, position))
        if self.loader.elastic_sampler is not None or self.loader.endless:
            self.counted, self._skipped = samples, True
        else:
            self._discard(samples)

    def _start(self, iterator: Iterator[Batch]) -> None:
        self.close()
        self.counted, self.ended, self.has_stated_sizes, self._skipped = 0, False, True, False
        self._stated_sizes = self.loader.batch_size, self.loader.length
        self._gives_new_memory = self.loader.gives_new_memory
        self._iterator = iterator
        self._memory.begin_pass()

    def _discard(self, samples: int) -> None:
        """Drops samples that were taken before the state was saved."""
        while samples:
            if not self._chunks:
                self._refetch(self._fetched + 1)
            head = self._chunks.popleft()
            dropped = min(samples, head.samples)
            if dropped < head.samples:
                self._chunks.appendleft(self._cut(head, dropped)[1])
            self.waiting -= dropped
            samples -= dropped

    def _refetch(self, needed: int) -> None:
        if not self._fetch():
            raise StateError(
                f"the loader has only {self._fetched} batches, the saved one had at least "
                f"{needed}; resume with the same data and batch size"
            )

    def _fetch(self) -> bool:
        """Takes one batch from the loader; False if it has none."""
        assert self._iterator is not None
        random_state, loader_state = self._random.read(), self.loader.loader_state()
        try:
            batch = next(self._iterator)
        except StopIteration:
            return False
        if not self._gives_new_memory:
            batch = self._admit(batch)
        if self._packed:
            batch = unpack(batch)
        size, length = self._stated_sizes
        stated = min(size, length - self.counted) if size and length is not None else None
        samples = self._count(batch)
        if self._fetched == 0 and self._requires_size:
            remedy = _PACKED_BEFORE if self._packed else REMEDY
            self.loader.require_samples(samples, self.counted, remedy)
        if stated not in (None, samples):
            self.has_stated_sizes = False
        self._chunks.append(_Chunk(batch, samples, 0, self._fetched, random_state, loader_state))
        self._fetched += 1
        self.counted += samples
        self.waiting += samples
        return True

    def _admit(self, batch: Batch) -> Batch:
        """The batch in memory that stays, its constants marked, and those of the first with it."""
        was_examined = self._memory.examined
        batch, constants = self._memory.admit(batch), self._memory.constants
        if constants and not was_examined:
            first = [c._replace(batch=mark_constants(c.batch, constants)) for c in self._chunks]
            self._chunks = deque(first)
        return mark_constants(batch, constants) if constants else batch

    def _cut(self, chunk: "_Chunk", samples: int) -> tuple["_Chunk", "_Chunk"]:
        head = self._split(chunk.batch, 0, samples)
        rest = self._split(chunk.batch, samples, chunk.samples)
        remaining, start = chunk.samples - samples, chunk.start + samples
        return (
            chunk._replace(batch=head, samples=samples),
            chunk._replace(batch=rest, samples=remaining, start=start),
        )


class _Chunk(NamedTuple):
    """A batch of the loader, or its last samples."""

    batch: Batch
    samples: int
    start: int  # samples of the loader's batch before these
    number: int  # number of the loader's batch in the pass
    random_state: RandomState  # random states before the batch was fetched
    loader_state: dict[str, Any] | None  # the loader's own state before that
