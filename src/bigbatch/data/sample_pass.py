"""One pass over the samples of all ranks: what is consumed, and this rank's share of the next."""

from collections.abc import Callable
from typing import NamedTuple

from bigbatch.data.collate import Batch
from bigbatch.data.rank_consistency import HostCollectives, samples_of_rank
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.errors import BatchError


class MicroBatch(NamedTuple):
    """One backward of one rank.

    Args:
        batch: its samples.
        samples: how many.
        global_samples: of the micro-batches that all ranks run together.
    """

    batch: Batch
    samples: int
    global_samples: int


class SamplePass:
    """Hands out rows, a row being one sample of every virtual rank.

    Args:
        buffer: this rank's samples.
        collectives: between the ranks.
        virtual_ranks: samples in a row, a multiple of the ranks.
        remainder: what becomes of the last samples: "share", "step" or "drop".
        lockstep: whether the ranks must do equally many backwards.
        place: moves a micro-batch to where it is needed; None: it stays.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        collectives: HostCollectives,
        virtual_ranks: int,
        remainder: str,
        *,
        lockstep: bool = False,
        place: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.consumed = 0  # samples that steps have taken, over all ranks
        self.end: int | None = None  # samples of the whole pass, once known
        self.virtual_ranks, self.remainder = virtual_ranks, remainder
        self._buffer, self._collectives, self._lockstep = buffer, collectives, lockstep
        self._place = place or _unmoved

    def rest(self, ahead: int) -> int | None:
        """Samples still to come; None where at least `ahead` are, and their number is unknown."""
        if self._collectives.ranks == 1:
            self._buffer.read_until(ahead if self.end is None else 1)
            if self._buffer.ended:
                self.end = self._buffer.counted
            elif self.end is not None and (
                self.consumed >= self.end or not self._buffer.as_said
            ):  # more than the loader's length, or fewer
                self.end = None
                return self.rest(ahead)
        return None if self.end is None else self.end - self.consumed

    def agree_on_end(self, ahead: int) -> list[int]:
        """For loaders of unknown length: the first to end ends the pass for all ranks. Collective.

        Args:
            ahead: how many samples to look ahead, over all ranks.
        Returns:
            How many samples of each rank stay unread; empty where the pass has not ended.
        """
        ranks = self._collectives.ranks
        self._buffer.read_until(-(-ahead // ranks))
        rows = self._collectives.gather(
            self._buffer.waiting, self._buffer.ended, what="their numbers of samples"
        )
        ends = [round(waiting) for waiting, ended in rows if ended]
        if not ends:
            return []
        self.end = self.consumed + min(ends) * ranks
        return [round(waiting) - min(ends) for waiting, _ in rows]

    def take(self, rows: int) -> tuple[list[MicroBatch], int]:
        """This rank's share of the next rows.

        Returns:
            A micro-batch for each virtual rank that this rank plays, and how many rows they are:
            fewer than asked for where batches cannot be concatenated.
        """
        rank, ranks, first = self._collectives.rank, self._collectives.ranks, self.consumed
        played = self.virtual_ranks // ranks
        wanted = rows * played
        if self.end is not None:
            end = samples_of_rank(self.end, rank, ranks)
            wanted = min(wanted, end - samples_of_rank(self.consumed, rank, ranks))
        batches, samples = self._buffer.take(wanted, played)
        if samples < wanted:
            self._require_short_allowed(played)
            rows = -(-samples // played)
        self.consumed += rows * self.virtual_ranks
        if ranks == 1:
            self.consumed = self._buffer.counted - self._buffer.waiting
        elif self.end is not None:
            self.consumed = min(self.consumed, self.end)
        micro_batches = [
            MicroBatch(
                self._place(batch),
                samples_of_rank(samples, turn, played),
                self._global_samples(first, rows, turn, played),
            )
            for turn, batch in enumerate(batches)
        ]
        return micro_batches, rows

    def _global_samples(self, first: int, rows: int, turn: int, played: int) -> int:
        """Samples of the micro-batches that all ranks run together."""
        ranks = self._collectives.ranks
        if self.consumed - first == rows * self.virtual_ranks:
            return rows * ranks
        taken = (
            samples_of_rank(self.consumed, rank, ranks) - samples_of_rank(first, rank, ranks)
            for rank in range(ranks)
        )
        return sum(samples_of_rank(samples, turn, played) for samples in taken)

    def _require_short_allowed(self, played: int) -> None:
        """Raises BatchError where a micro-batch must not have fewer samples than planned."""
        if self._buffer.waiting:
            if self._lockstep or played > 1:
                raise BatchError(
                    "batches of different shapes cannot be concatenated, and the ranks must do "
                    "equally many backwards of equal groups; pad them to one length in the collate "
                    "function"
                )
        elif self._collectives.ranks > 1:
            raise BatchError(
                f"the loader ended after {self._buffer.counted} samples, fewer than its length; "
                "ranks that take steps together need the true length, or none (IterableDataset)"
            )


def _unmoved(batch: Batch) -> Batch:
    return batch
