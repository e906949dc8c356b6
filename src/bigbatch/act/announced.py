"""Micro-batches that another loop goes through, a trainer's say: announced, not cut here."""

from collections.abc import Iterator
from typing import Any

from bigbatch.act.agreement import Agreement
from bigbatch.decide.plan import BatchPlan, require_positive
from bigbatch.errors import LoopError, StateError

_ORDER = "another loop's"


class Announced:
    """Stands where `Batches` does, for a loop that is not ours and whose micro-batches are given.

    Of a plan the accumulation alone is carried out; the samples of a step are known at its end.
    Every rank announces equally many micro-batches.

    Args:
        batch_size: samples in one of its micro-batches, on one rank.
        samples: in one epoch over all ranks; None where nobody knows.
    """

    tail, order = "step", _ORDER

    def __init__(self, batch_size: int, samples: int | None = None) -> None:
        require_positive(batch_size=batch_size)
        self.batch_size = batch_size
        self.samples = samples
        self.virtual_ranks = 1
        self.open = False
        self.waiting: int | None = None  # samples of the micro-batch that comes next
        self.ends = False  # whether it is the last of an epoch
        self._cut_short = False  # whether the last step was

    def share(self, agreement: Agreement, *, lockstep: bool) -> None:
        """Several ranks take the steps together from now on."""
        self.virtual_ranks = agreement.ranks

    def start(self, epoch: int) -> None:
        """Starts a pass."""
        self.open, self.ends = True, False

    def step(
        self, plan: BatchPlan, least: int, most: int | None = None, rows: int = 1
    ) -> "AnnouncedStep | None":
        """The next step; None where the pass has ended."""
        self.open = not self.ends
        return AnnouncedStep(self, plan) if self.open else None

    def announce(self, samples: int, *, ends: bool) -> None:
        """The micro-batch that comes next, before its forward.

        Args:
            samples: of it, on this rank.
            ends: whether it is the last of an epoch, and of its step however few came before.
        """
        self.waiting, self.ends = samples, ends

    def take(self, *, planned_last: bool) -> int:
        """The samples of the micro-batch that was announced."""
        if self.waiting is None:
            raise LoopError("a micro-batch was not announced before its forward")
        samples, self.waiting = self.waiting, None
        self._cut_short = self.ends and not planned_last
        return samples

    def was_whole(self, samples: int, plan: BatchPlan) -> bool:
        """Whether the last step had as many micro-batches as were planned."""
        return not self._cut_short

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where the pass stands is the other loop's to know."""
        return {"pass": {"order": _ORDER}, "stream": None}

    def load_state_dict(self, state: dict[str, Any], epoch: int, *, mine: bool = True) -> None:
        """Begins with a new step.

        Raises:
            StateError: the state is of a loop of our own.
        """
        if state["pass"]["order"] != _ORDER:
            raise StateError(
                "the state was saved by a loop over a loader of its own, which knows where in its "
                "data it stood; resume with that"
            )
        self.open, self.waiting = False, None


class AnnouncedStep:
    """The micro-batches of one step: as many as were planned, or fewer where an epoch ends.

    Args:
        batches: what is announced.
        plan: how many are wanted.
    """

    known = False

    def __init__(self, batches: Announced, plan: BatchPlan) -> None:
        self.last = False
        self.samples = plan.batch_size  # expected
        self.everywhere = 0
        self._batches, self._left = batches, plan.accumulation

    def __iter__(self) -> Iterator[tuple[None, int]]:
        while self._left and not self.last:
            self._left -= 1
            samples = self._batches.take(planned_last=not self._left)
            self.last = not self._left or self._batches.ends
            yield None, samples
