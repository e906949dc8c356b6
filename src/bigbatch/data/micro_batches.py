"""One pass over the samples of all ranks, and the micro-batches of its steps."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bigbatch.data.collate import Batch
from bigbatch.data.rank_consistency import HostCollectives, samples_of_rank
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.errors import BatchError
from bigbatch.policies.plan import BatchPlan
from bigbatch.setting_types import Remainder

DIFFERENT_SHAPES = (
    "batches of different shapes cannot be concatenated, and the ranks must do equally many "
    "backwards of equal groups; pad them to one length in the collate function"
)


class MicroBatch(NamedTuple):
    """The samples of one backward of one rank."""

    batch: Batch  # None if another loop has it
    samples: int
    global_samples: int  # of the micro-batches that all ranks run together, if known


@dataclass
class SamplePass:
    """Hands out rows; a row is one sample of every virtual rank."""

    buffer: SampleBuffer  # this rank's samples
    collectives: HostCollectives
    virtual_ranks: int  # samples in a row, a multiple of the ranks
    remainder: Remainder  # use of the last samples; see `Batches`
    lockstep: bool = False  # whether the ranks must do equally many backwards
    consumed: int = 0  # samples that steps have taken, over all ranks
    end: int | None = None  # samples of the whole pass, once known

    def remaining(self, ahead: int) -> int | None:
        """Samples still to come; None if their number is unknown and at least `ahead`."""
        if self.buffer.loader.endless:
            self.buffer.read_until(1)  # one batch ahead, as a loop by hand draws them
            return None
        if self.collectives.ranks == 1:
            self.buffer.read_until(ahead if self.end is None else 1)
            if self.buffer.ended:
                self.end = self.buffer.counted
            elif self.end is not None and (
                self.consumed >= self.end or not self.buffer.has_stated_sizes
            ):  # more than the loader's length, or fewer
                self.end = None
                return self.remaining(ahead)
        return None if self.end is None else self.end - self.consumed

    def agree_on_end(self, ahead: int) -> list[int]:
        """Unread samples by rank, if the first to end has ended the pass for all. Collective."""
        ranks = self.collectives.ranks
        self.buffer.read_until(-(-ahead // ranks))
        subject = "their numbers of samples"
        (ended,) = self.collectives.sum(self.buffer.ended, subject=subject)
        if not ended:
            return []
        rows = self.collectives.all_gather(self.buffer.waiting, self.buffer.ended)
        rows = self.collectives.of_ranks(rows, subject)
        ends = [round(waiting) for waiting, has_ended in rows if has_ended]
        self.end = self.consumed + min(ends) * ranks
        return [round(waiting) - min(ends) for waiting, _ in rows]

    def take(self, rows: int) -> tuple[list[MicroBatch], int]:
        """This rank's share of the next rows.

        Returns:
            A micro-batch for each virtual rank of this rank, and their number of rows: fewer than
            `rows` if batches cannot be concatenated.
        """
        rank, ranks, start = self.collectives.rank, self.collectives.ranks, self.consumed
        turns = self.virtual_ranks // ranks  # virtual ranks of this rank
        planned = rows * turns
        if self.end is not None:
            end = samples_of_rank(self.end, rank, ranks)
            planned = min(planned, end - samples_of_rank(start, rank, ranks))
        batches, samples = self.buffer.take(planned, turns)
        if samples < planned:
            self._require_short_allowed(turns)
            rows = -(-samples // turns)
        self.consumed += rows * self.virtual_ranks
        if ranks == 1:
            self.consumed = self.buffer.counted - self.buffer.waiting
        elif self.end is not None:
            self.consumed = min(self.consumed, self.end)
        is_full = self.consumed - start == rows * self.virtual_ranks
        return [
            MicroBatch(
                batch,
                samples_of_rank(samples, turn, turns),
                rows * ranks if is_full else self._global_samples(start, turn, turns),
            )
            for turn, batch in enumerate(batches)
        ], rows

    def _global_samples(self, start: int, turn: int, turns: int) -> int:
        """Samples since `start` in the micro-batches that all ranks run together."""
        ranks = self.collectives.ranks
        samples_by_rank = (
            samples_of_rank(self.consumed, rank, ranks) - samples_of_rank(start, rank, ranks)
            for rank in range(ranks)
        )
        return sum(samples_of_rank(samples, turn, turns) for samples in samples_by_rank)

    def _require_short_allowed(self, turns: int) -> None:
        """Raises BatchError if a micro-batch must not have fewer samples than planned."""
        if self.buffer.waiting:
            if self.lockstep or turns > 1:
                raise BatchError(DIFFERENT_SHAPES)
        elif self.collectives.ranks > 1:
            raise BatchError(
                f"the loader ended after {self.buffer.counted} samples, fewer than its length; "
                "ranks that take steps together need the true length, or none (IterableDataset)"
            )


class StepBatches:
    """The micro-batches of one step on this rank; each is fetched when it is asked for.

    If the length of the pass is unknown, it looks ahead by one micro-batch and the least next
    step, so that the end is known before it is too late to share the last samples.
    """

    samples_known = True  # before the step is over

    def __init__(
        self,
        sample_pass: SamplePass,
        plan: BatchPlan,
        min_batch: int,
        max_batch: int | None,
        min_rows: int = 1,
    ) -> None:
        self.last = False  # whether the present micro-batch is the step's last on this rank
        self._pass = sample_pass
        self._plan = plan
        self._row = sample_pass.virtual_ranks  # samples in a row
        self._min_next = {
            "share": max(min_batch, self._row),
            "step": min_rows * self._row,
            "drop": 0,
        }[sample_pass.remainder]
        self._max_batch = max_batch
        self._start = sample_pass.consumed
        self._rows = plan.micro * plan.accumulation  # still to come in this step
        self._remaining: int | None = None  # samples still to come in the pass, if they matter
        self._end: int | None = None  # end of the pass for which the step was cut
        self._cut = 0  # micro-batches of each virtual rank that were cut
        self._waiting: deque[MicroBatch] = deque()  # cut, and not yet asked for

    @property
    def samples(self) -> int:
        """Samples of the step over all ranks, as far as is known."""
        to_come = self._rows * self._row
        return self._taken + (to_come if self._remaining is None else min(to_come, self._remaining))

    def __iter__(self) -> Iterator[MicroBatch]:
        self._look_ahead()
        while self._rows or self._waiting:
            if not self._waiting:
                micro_batches, rows = self._pass.take(self._next_rows())
                self._waiting.extend(micro_batches)
                self._rows -= rows
                self._cut += 1
                self._look_ahead()  # before the yield, which needs `last`
            micro_batch = self._waiting.popleft()
            self.last = not self._rows and not self._waiting
            yield micro_batch

    @property
    def _taken(self) -> int:
        """Samples of the step so far, over all ranks."""
        return self._pass.consumed - self._start

    @property
    def _uncut(self) -> int:
        """Micro-batches of each virtual rank still planned; below 0 if more were needed."""
        return self._plan.accumulation - self._cut

    def _next_rows(self) -> int:
        """Rows of the next micro-batch: the rows are spread evenly, larger micro-batches last.

        A last row that is not full leaves every virtual rank a sample of the last micro-batch.
        """
        rows, remaining = self._rows, self._remaining
        micro_batches = max(1, self._uncut, -(-rows // self._plan.micro))
        full_rows = rows if remaining is None else min(rows, remaining // self._row)
        return rows // max(1, min(micro_batches, full_rows))

    def _look_ahead(self) -> None:
        rows = min(self._rows, self._plan.micro) + self._uncut
        remaining = self._pass.remaining(rows * self._row + self._min_next)
        self._remaining = remaining
        if remaining is None or self._end == self._pass.consumed + remaining:
            return
        self._end = self._pass.consumed + remaining
        next_step = remaining - self._rows * self._row
        if next_step < 0 or 0 < next_step < self._min_next:
            self._recut(remaining)

    def _recut(self, remaining: int) -> None:
        """Too few samples would follow this step: take them all, or share with the next step."""
        total, all_rows = self._taken + remaining, -(-remaining // self._row)
        fits = self._max_batch is None or total <= self._max_batch
        if fits or remaining <= self._rows * self._row:
            self._rows = all_rows
            return
        smallest = self._taken + self._row * (self._uncut if self._cut else 1)
        batch_size = max(smallest, total - total // 2)
        self._rows = min(all_rows, (batch_size - self._taken) // self._row)
        if remaining - self._rows * self._row < self._row:  # not one for each virtual rank
            self._rows = all_rows
