"""Micro-batches that are as many whole samples as fit into a number of tokens."""

from collections.abc import Iterator, Sequence

from bigbatch.data.micro_batches import DIFFERENT_SHAPES, MicroBatch
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.errors import BatchError, LoopError
from bigbatch.policies.plan import BatchPlan
from bigbatch.setting_types import Remainder

# [Note: Tokens as the unit]
# A sample (a sequence) cannot be cut, so a micro-batch has about the planned tokens. Its size is
# chosen so that the step so far is nearest to its own plan, and no micro-batch is above the bound
# of memory unless one sample alone is. Each rank does so with its own samples: all do equally many
# backwards, of different sizes, and the sums of the step say how many tokens it had. A rank whose
# batches differ in shape, and cannot be joined, adds micro-batches until it has its tokens; where
# ranks run in lockstep that is an error. Whether there is another step is agreed on before it, as
# nobody knows how many tokens a data set has: each rank counts the micro-batches that it can still
# make, and the fewest count.


class TokenPass:
    """One pass over this rank's samples, in steps that are planned in tokens."""

    def __init__(
        self,
        buffer: SampleBuffer,
        collectives: HostCollectives,
        remainder: Remainder,
        lockstep: bool = False,
    ) -> None:
        # whether the last step has its planned micro-batches, or is a whole pass
        self.is_complete = True
        self._has_begun = False  # whether the pass has had a step
        self.unread: list[int] = []  # samples of each rank that no step takes, once it has ended
        self._buffer, self._collectives, self._remainder = buffer, collectives, remainder
        self._lockstep = lockstep

    def start(self, *, has_begun: bool = False) -> None:
        """Starts a pass, or the rest of one."""
        self._has_begun = has_begun

    def step(self, plan: BatchPlan, max_micro: int, min_rows: int) -> "TokenStep | None":
        """The next step; None if the pass has ended. Collective, unless the loader has no end.

        Args:
            plan: in tokens.
            max_micro: most tokens in one backward.
            min_rows: fewest micro-batches of the last step.
        """
        accumulation = self._accumulation(plan, max_micro, min_rows)
        is_planned = accumulation == plan.accumulation
        self.is_complete = is_planned or not self._has_begun
        if not accumulation or (self._remainder == "drop" and not is_planned):
            return None
        self._has_begun = True
        return TokenStep(self._buffer, plan, accumulation, max_micro, self._lockstep)

    def _accumulation(self, plan: BatchPlan, max_micro: int, min_rows: int) -> int:
        """Micro-batches of the next step on every rank; 0 if there are none."""
        planned = plan.accumulation
        if self._buffer.loader.endless:
            return planned
        ahead = planned + min_rows
        lengths = self._buffer.token_lengths(plan.micro * ahead, ahead)
        own = _micro_batches(lengths, plan.micro, max_micro, ahead)
        subject = "their numbers of tokens"
        rows = self._collectives.all_gather(
            own, self._buffer.waiting, self._buffer.ended, subject=subject
        )
        rows = self._collectives.of_ranks(rows, subject)
        if not any(ended for *_, ended in rows):
            return planned
        waiting = [round(number) for _, number, _ in rows]
        total = min(round(made) for made, *_ in rows)
        if not total:
            self.unread = waiting
        elif total < min_rows:  # of smaller ones
            total = min(min_rows, *waiting)
        if 0 < total - planned < min_rows:  # too few for a step: take all, or leave enough
            return total - min_rows if total >= 2 * min_rows else total
        return min(planned, total)


class TokenStep:
    """The micro-batches of one step on this rank; see [Note: Tokens as the unit]."""

    samples_known = False  # before the step is over

    def __init__(
        self,
        buffer: SampleBuffer,
        plan: BatchPlan,
        accumulation: int,
        max_micro: int,
        lockstep: bool = False,
    ) -> None:
        self.last = False
        self.samples = plan.ranks * plan.micro * accumulation  # tokens, as planned
        self._buffer, self._micro, self._max_micro = buffer, plan.micro, max_micro
        self._accumulation, self._lockstep = accumulation, lockstep
        self._adds = False  # whether batches could not be joined

    def __iter__(self) -> Iterator[MicroBatch]:
        taken = number = 0
        while not self.last:
            number += 1
            target = self._micro * min(number, self._accumulation) - taken
            lengths = self._buffer.token_lengths(target + 1, 1)
            to_leave = 0 if self._buffer.loader.endless else max(0, self._accumulation - number)
            planned = _nearest(lengths, target, self._max_micro, to_leave)
            batches, samples = self._buffer.take(planned)
            if not samples:
                raise LoopError("the loader ended within a step; its length was another before")
            if samples < planned:
                if self._lockstep:
                    raise BatchError(DIFFERENT_SHAPES)
                self._adds = True
            tokens = sum(lengths[:samples])
            if not tokens:
                raise BatchError("every token of a micro-batch is padding; leave such samples out")
            taken += tokens
            missing = self._micro * self._accumulation - taken
            self.last = number >= self._accumulation and not self._needs_more(missing)
            yield MicroBatch(batches[0], tokens, 0)

    def _needs_more(self, missing: int) -> bool:
        """Whether one more sample brings the step nearer to its plan, which lacks these tokens."""
        lengths = self._buffer.token_lengths(1, 1) if self._adds and missing > 0 else []
        return bool(lengths) and 2 * missing >= lengths[0]


def _nearest(lengths: Sequence[int], target: int, most: int, to_leave: int) -> int:
    """How many samples have the number of tokens nearest to a target: at least one.

    At most those of `most` tokens, and one is left for each of `to_leave` micro-batches.
    """
    tokens = lengths[0] if lengths else 0
    for number, length in enumerate(lengths[1 : max(1, len(lengths) - to_leave)], 1):
        if tokens + length > most or 2 * (target - tokens) < length:
            return number
        tokens += length
    return max(1, len(lengths) - to_leave)


def _micro_batches(lengths: Sequence[int], micro: int, most: int, limit: int) -> int:
    """Micro-batches of about so many tokens that the samples make; at most `limit`."""
    taken, tokens = 0, 0
    for number in range(1, limit + 1):
        if taken == len(lengths):
            return number - 1
        samples = _nearest(lengths[taken:], micro * number - tokens, most, 0)
        tokens += sum(lengths[taken : taken + samples])
        taken += samples
    return limit
