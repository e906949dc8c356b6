"""Micro-batches that another loop goes through, a trainer's say: announced, not cut here."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import LoopError, StateError
from bigbatch.policies.plan import BatchPlan
from bigbatch.setting_types import Count, checked

_ORDER = "another loop's"


class _Waiting(NamedTuple):
    """A micro-batch that was announced."""

    samples: int
    ends: bool
    left: int | None


class ExternalBatches:
    """Stands where `Batches` does, for a loop that is not ours and whose micro-batches are given.

    Of a plan the accumulation alone is carried out; the samples of a step are known at its end.
    Every rank announces equally many micro-batches.

    Args:
        batch_size: samples in one of its micro-batches, on one rank.
        samples: in one epoch over all ranks; None where nobody knows.
    """

    remainder, order = "step", _ORDER

    @checked
    def __init__(self, batch_size: Count, samples: Count | None = None) -> None:
        self.batch_size = batch_size
        self.samples = samples
        self.virtual_ranks = 1
        self.open = False
        self.ends = False  # whether the micro-batch that was taken last is the last of an epoch
        self._waiting: _Waiting | None = None  # the micro-batch that comes next
        self._taken = 0  # micro-batches of the present step

    def share(self, agreement: HostCollectives, *, lockstep: bool) -> None:
        """Several ranks take the steps together from now on."""
        self.virtual_ranks = agreement.ranks

    def start(self, epoch: int) -> None:
        """Starts a pass."""
        self.open, self.ends = True, False

    def step(
        self, plan: BatchPlan, least: int, most: int | None = None, rows: int = 1
    ) -> "ExternalStep | None":
        """The next step; None where the pass has ended."""
        self.open, self._taken = not self.ends, 0
        if not self.open:
            return None
        left = None if self._waiting is None else self._waiting.left
        return ExternalStep(self, plan, _cut_for(plan.accumulation, left, rows))

    def announce(self, samples: int, *, ends: bool, left: int | None = None) -> None:
        """The micro-batch that comes next, before its forward.

        Args:
            samples: of it, on this rank.
            ends: whether it is the last of an epoch, and of its step however few came before.
            left: how many come after it in the epoch, where that is known. Then none is left over
                that a variance-reduced optimizer, which compares two, could do nothing with.
        """
        self._waiting = _Waiting(samples, ends, left)

    def take(self) -> int:
        """The samples of the micro-batch that was announced."""
        if self._waiting is None:
            raise LoopError("a micro-batch was not announced before its forward")
        taken, self._waiting = self._waiting, None
        self.ends = taken.ends
        self._taken += 1
        return taken.samples

    def was_whole(self, samples: int, plan: BatchPlan) -> bool:
        """Whether the last step had as many micro-batches as were planned."""
        return self._taken == plan.accumulation

    def state_dict(self) -> dict[str, Any]:
        """Whether a pass is under way; where it stands is the other loop's to know."""
        return {"pass": {"order": _ORDER, "open": self.open}, "stream": None}

    def load_state_dict(self, state: dict[str, Any], epoch: int, *, same_rank: bool = True) -> None:
        """Begins with a new step.

        Raises:
            StateError: the state is of a loop of our own.
        """
        if state["pass"]["order"] != _ORDER:
            raise StateError(
                "the state was saved by a loop over a loader of its own, which knows where in its "
                "data it stood; resume with that"
            )
        self.open, self._waiting = False, None


class ExternalStep:
    """The micro-batches of one step: so many, or fewer where an epoch ends.

    Args:
        batches: what is announced.
        plan: whose micro-batches they are.
        wanted: how many.
    """

    known = False

    def __init__(self, batches: ExternalBatches, plan: BatchPlan, wanted: int) -> None:
        self.last = False
        self.samples = plan.batch_size // plan.accumulation * wanted  # expected
        self.global_samples = 0
        self._batches, self._left = batches, wanted

    def __iter__(self) -> Iterator[tuple[None, int]]:
        while self._left and not self.last:
            self._left -= 1
            samples = self._batches.take()
            self.last = not self._left or self._batches.ends
            yield None, samples


def _cut_for(planned: int, left: int | None, least: int) -> int:
    """How many micro-batches a step has, so that the one after it has `least`, or none is left."""
    rest = 0 if left is None else 1 + left - planned
    if not 0 < rest < least:
        return planned
    together = planned + rest
    return together - least if together >= 2 * least else together
