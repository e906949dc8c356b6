"""The micro-batches of one step, cut from a pass in rows of one sample per virtual rank."""

from collections import deque
from collections.abc import Iterator

from bigbatch.data.sample_pass import MicroBatch, SamplePass
from bigbatch.policies.plan import BatchPlan


class StepBatches:
    """The micro-batches of one step on this rank; each is fetched when it is asked for.

    If the length of the pass is unknown, it looks ahead by one micro-batch and the least next
    step, so that the end is known before it is too late to share the last samples.

    Args:
        sample_pass: the pass that the samples come from.
        plan: how the step is cut, among the virtual ranks.
        min_batch: fewest samples of the next step.
        max_batch: upper bound of a step in samples, or None.
        min_rows: fewest rows of a last step that remainder="step" makes.
    """

    known = True

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
