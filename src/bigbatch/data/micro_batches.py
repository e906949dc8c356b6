"""The micro-batches of one step, cut from a pass in rows of one sample a virtual rank."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from bigbatch.data.collate import Batch
from bigbatch.data.sample_pass import MicroBatch, SamplePass
from bigbatch.policies.plan import BatchPlan


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
        samples: of the pass.
        plan: how the step is cut, among the virtual ranks.
        least: fewest samples that the step after it may be left with.
        most: upper bound of a step in samples, or None.
        rows: fewest rows of a step of its own at the end of the pass, where the remainder is one.
    """

    known = True

    def __init__(
        self, samples: SamplePass, plan: BatchPlan, least: int, most: int | None, rows: int = 1
    ) -> None:
        self.last = False  # whether the micro-batch given out is the step's last on this rank
        self.global_samples = 0  # samples of those that the ranks were given together
        self._pass = samples
        self._plan = plan
        self._row = samples.virtual_ranks
        self._least = {"share": max(least, self._row), "step": rows * self._row, "drop": 0}[
            samples.remainder
        ]
        self._most = most
        self._before = samples.consumed
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
                micro_batches, rows = self._pass.take(self._next_rows())
                self._waiting.extend(micro_batches)
                self._left -= rows
                self._given += 1
                self._look_ahead()  # before the yield: whether this was the last is known by then
            batch, samples, self.global_samples = self._waiting.popleft()
            self.last = not self._left and not self._waiting
            yield batch, samples

    @property
    def _taken(self) -> int:
        return self._pass.consumed - self._before

    def _next_rows(self) -> int:
        """What is left, spread evenly over the micro-batches that it needs, larger ones last.

        A last row that is not full leaves every virtual rank a sample of the last micro-batch.
        """
        parts = max(1, self._unmade(), -(-self._left // self._plan.micro))
        full = self._left if self._rest is None else min(self._left, self._rest // self._row)
        return self._left // max(1, min(parts, full))

    def _look_ahead(self) -> None:
        rows = min(self._left, self._plan.micro) + self._unmade()
        self._rest = rest = self._pass.rest(rows * self._row + self._least)
        if rest is None or self._end == self._pass.consumed + rest:
            return
        self._end = self._pass.consumed + rest
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
