"""One pass over the samples of all ranks: what is consumed, and this rank's share of the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bigbatch.data.collate import Batch
from bigbatch.data.rank_consistency import HostCollectives, samples_of_rank
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.errors import BatchError


class MicroBatch(NamedTuple):
    """The samples of one backward of one rank.

    Args:
        batch: the samples; None if another loop has them.
        samples: number of samples.
        global_samples: samples of the micro-batches that all ranks run together, if known.
    """

    batch: Batch
    samples: int
    global_samples: int


@dataclass
class SamplePass:
    """Hands out rows; a row is one sample of every virtual rank.

    Args:
        buffer: this rank's samples.
        collectives: collectives between the ranks.
        virtual_ranks: samples in a row, a multiple of the ranks.
        remainder: use of the last samples: "share", "step" or "drop".
        lockstep: whether the ranks must do equally many backwards.
        place: moves a micro-batch to its device, for example; None to leave it.
        consumed: samples that steps have taken, over all ranks.
        end: samples of the whole pass, once known.
    """

    buffer: SampleBuffer
    collectives: HostCollectives
    virtual_ranks: int
    remainder: str
    lockstep: bool = False
    place: Callable[[Batch], Batch] | None = None
    consumed: int = 0
    end: int | None = None

    def remaining(self, ahead: int) -> int | None:
        """Samples still to come; None if their number is unknown and at least `ahead`."""
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
        """For loaders of unknown length: the first to end ends the pass for all ranks. Collective.

        Args:
            ahead: how many samples to look ahead, over all ranks.
        Returns:
            How many samples of each rank stay unread; empty if the pass has not ended.
        """
        ranks = self.collectives.ranks
        self.buffer.read_until(-(-ahead // ranks))
        rows = self.collectives.all_gather(
            self.buffer.waiting, self.buffer.ended, subject="their numbers of samples"
        )
        ends = [round(waiting) for waiting, ended in rows if ended]
        if not ends:
            return []
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
        wanted = rows * turns
        if self.end is not None:
            end = samples_of_rank(self.end, rank, ranks)
            wanted = min(wanted, end - samples_of_rank(start, rank, ranks))
        batches, samples = self.buffer.take(wanted, turns)
        if samples < wanted:
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
                batch if self.place is None else self.place(batch),
                samples_of_rank(samples, turn, turns),
                rows * ranks if is_full else self._global_samples(start, turn, turns),
            )
            for turn, batch in enumerate(batches)
        ], rows

    def _global_samples(self, start: int, turn: int, turns: int) -> int:
        """Samples since `start` in the micro-batches that all ranks run together."""
        ranks = self.collectives.ranks
        taken = (
            samples_of_rank(self.consumed, rank, ranks) - samples_of_rank(start, rank, ranks)
            for rank in range(ranks)
        )
        return sum(samples_of_rank(samples, turn, turns) for samples in taken)

    def _require_short_allowed(self, turns: int) -> None:
        """Raises BatchError if a micro-batch must not have fewer samples than planned."""
        if self.buffer.waiting:
            if self.lockstep or turns > 1:
                raise BatchError(
                    "batches of different shapes cannot be concatenated, and the ranks must do "
                    "equally many backwards of equal groups; pad them to one length in the collate "
                    "function"
                )
        elif self.collectives.ranks > 1:
            raise BatchError(
                f"the loader ended after {self.buffer.counted} samples, fewer than its length; "
                "ranks that take steps together need the true length, or none (IterableDataset)"
            )
