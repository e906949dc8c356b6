"""How one step is cut out of a pass: into rows, one sample of every virtual rank each."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from bigbatch.data.collate import Batch
from bigbatch.policies.plan import BatchPlan


class MicroBatch(NamedTuple):
    """One backward of one rank.

    Args:
        batch: its samples.
        samples: how many.
        everywhere: of the micro-batches of all ranks that are run together.
    """

    batch: Batch
    samples: int
    global_samples: int


class Pass(Protocol):
    """What a step is cut from."""

    @property
    def consumed(self) -> int:
        """Samples that were taken, over all ranks."""

    @property
    def virtual_ranks(self) -> int:
        """Samples in a row."""

    @property
    def remainder(self) -> str:
        """What becomes of the last samples: "share", "step" or "drop"."""

    def rest(self, ahead: int) -> int | None:
        """Samples still to come; None where at least `ahead`, and nobody says more."""

    def take(self, rows: int) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches of the next rows, and how many rows."""


class Cut(Protocol):
    """The micro-batches of one step on this rank."""

    last: bool
    """Whether the one given out is the step's last on this rank."""
    global_samples: int
    """Samples of those that the ranks were given together, where `known`."""
    known: bool
    """Whether the samples are known before the step is over."""

    @property
    def samples(self) -> int:
        """Samples of the step over all ranks, as far as is known."""

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Micro-batches and how many samples each has."""


class StepBatches:
    """The micro-batches of one step on this rank, and their samples; fetched as they are asked for.

    Where the length of the pass is not known, it looks ahead by one micro-batch and the least next
    step, so that the end is known before it is too late to share the last samples.

    Args:
        batches: the pass.
        plan: how the step is cut, among the virtual ranks.
        least: fewest samples that the step after it may be left with.
        most: upper bound of a step in samples, or None.
        rows: fewest rows of a step of its own at the end of the pass, where the remainder is one.
    """

    known = True

    def __init__(
        self, batches: Pass, plan: BatchPlan, least: int, most: int | None, rows: int = 1
    ) -> None:
        self.last = False  # whether the micro-batch given out is the step's last on this rank
        self.global_samples = 0  # samples of those that the ranks were given together
        self._batches = batches
        self._plan = plan
        self._row = batches.virtual_ranks
        self._least = {"share": max(least, self._row), "step": rows * self._row, "drop": 0}[
            batches.remainder
        ]
        self._most = most
        self._before = batches.consumed
        self._left = plan.micro * plan.accumulation  # rows still to come in this step
        self._rest: int | None = None  # samples still to come in the pass, where they matter
        self._end: int | None = None  # of the pass, that the step was cut for
        self._given = 0  # micro-batches, of each virtual rank
        self._waiting: deque[MicroBatch] = deque()  # of the rows taken last

    @property
    def samples(self) -> int:
        """Samples of the step over all ranks, as far as is known."""
        to_come = self._left * self._row
        return self._taken + (to_come if self._rest is None else min(to_come, self._rest))

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        self._look_ahead()
        while self._left or self._waiting:
            if not self._waiting:
                mine, rows = self._batches.take(self._next_rows())
                self._waiting.extend(mine)
                self._left -= rows
                self._given += 1
                self._look_ahead()  # before the yield: whether this was the last is known by then
            batch, samples, self.global_samples = self._waiting.popleft()
            self.last = not self._left and not self._waiting
            yield batch, samples

    @property
    def _taken(self) -> int:
        return self._batches.consumed - self._before

    def _next_rows(self) -> int:
        """What is left, spread evenly over the micro-batches that it needs, larger ones last.

        A last row that is not full leaves every virtual rank a sample of the last micro-batch.
        """
        pieces = max(1, self._unmade(), -(-self._left // self._plan.micro))
        full = self._left if self._rest is None else min(self._left, self._rest // self._row)
        return self._left // max(1, min(pieces, full))

    def _look_ahead(self) -> None:
        rows = min(self._left, self._plan.micro) + self._unmade()
        self._rest = rest = self._batches.rest(rows * self._row + self._least)
        if rest is None or self._end == self._batches.consumed + rest:
            return
        self._end = self._batches.consumed + rest
        after = rest - self._left * self._row
        if after < 0 or 0 < after < self._least:
            self._recut(rest)

    def _recut(self, rest: int) -> None:
        """Too few samples are left after this step: take them all, or share with the next."""
        total, rows = self._taken + rest, -(-rest // self._row)
        if self._most is None or total <= self._most or rest <= self._left * self._row:
            self._left = rows
            return
        first = self._taken + self._row * (self._unmade() if self._given else 1)
        ours = max(first, total - total // 2)
        self._left = min(rows, (ours - self._taken) // self._row)
        if rest - self._left * self._row < self._row:  # not one for each virtual rank
            self._left = rows

    def _unmade(self) -> int:
        """Micro-batches that the plan still has, of each virtual rank; below 0 where more came."""
        return self._plan.accumulation - self._given
