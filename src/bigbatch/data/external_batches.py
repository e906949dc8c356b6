"""Micro-batches of another loop, a trainer's for example: announced by it, not cut here."""

from collections.abc import Iterator
from typing import Any

from bigbatch.data.micro_batches import MicroBatch
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import LoopError, StateError
from bigbatch.policies.plan import BatchPlan
from bigbatch.setting_types import Count, Unit, checked
from bigbatch.state_checks import loads_state

_ORDER = "another loop's"


class ExternalBatches:
    """Takes the place of `Batches` for a loop that has its own micro-batches.

    Only the accumulation of a plan is carried out. The samples of a step are known at its end.
    Every rank announces equally many micro-batches.

    Args:
        batch_size: samples in one of the loop's micro-batches, on one rank.
        samples: samples in one epoch over all ranks; None if unknown.
    """

    remainder, order, packed = "step", _ORDER, False
    unit: Unit = "samples"

    @checked
    def __init__(self, batch_size: Count, samples: Count | None = None) -> None:
        self.batch_size = batch_size
        self.samples = samples
        self.virtual_ranks = 1
        self.open = False
        self.ends_epoch = False  # whether the last micro-batch of the step ends an epoch
        self.micro_batches = 0  # of the present step, so far
        self._announced: tuple[int, bool] | None = None  # samples, ends_epoch of the next one
        self._remaining: int | None = None  # micro-batches that follow it in the epoch

    def share(self, collectives: HostCollectives, *, lockstep: bool) -> None:
        """Several ranks take the steps together from now on."""
        self.virtual_ranks = collectives.ranks

    def start(self, epoch: int) -> None:
        """Starts a pass."""
        self.open, self.ends_epoch = True, False

    def step(
        self, plan: BatchPlan, *bounds: int | None, min_rows: int = 1, max_micro: int | None = None
    ) -> "ExternalStep | None":
        """The next step; None when the pass has ended.

        Args:
            plan: its accumulation is the number of micro-batches, unless the epoch ends first.
            bounds: unused, as the other loop decides on samples.
            min_rows: fewest micro-batches of the last step of an epoch.
            max_micro: unused.
        """
        self.open, self.micro_batches = not self.ends_epoch, 0
        if not self.open:
            return None
        accumulation = plan.accumulation
        if self._remaining is not None:
            total = 1 + self._remaining  # micro-batches to the end of the epoch
            if 0 < total - accumulation < min_rows:  # too few for a step: take all, or leave enough
                accumulation = total - min_rows if total >= 2 * min_rows else total
        return ExternalStep(self, plan, accumulation)

    def announce(self, samples: int, *, ends_epoch: bool, remaining: int | None = None) -> None:
        """Describes the next micro-batch, before its forward.

        Args:
            samples: samples of the micro-batch, on this rank.
            ends_epoch: whether it is the last of an epoch, and so of its step.
            remaining: micro-batches that follow it in the epoch, if known. Then no last step has
                a single one, which a variance-reduced optimizer could compare with no other.
        """
        self._announced, self._remaining = (samples, ends_epoch), remaining

    def take(self) -> int:
        """The samples of the announced micro-batch."""
        if self._announced is None:
            raise LoopError("a micro-batch was not announced before its forward")
        samples, self.ends_epoch = self._announced
        self._announced = self._remaining = None
        self.micro_batches += 1
        return samples

    def is_complete(self, samples: int, plan: BatchPlan) -> bool:
        """Whether the last step had as many micro-batches as planned."""
        return self.micro_batches == plan.accumulation

    def state_dict(self) -> dict[str, Any]:
        """Whether a pass has begun; the other loop knows its position."""
        return {"pass": {"order": _ORDER, "open": self.open}, "stream": None}

    @loads_state
    def load_state_dict(self, state: dict[str, Any], epoch: int, *, same_rank: bool = True) -> None:
        """Continues with a new step."""
        if state["pass"]["order"] != _ORDER:
            raise StateError(
                "the state was saved by a loop over a loader of its own, which knows its position "
                "in the data; resume with that loop"
            )
        self.open, self._announced, self._remaining = False, None, None


class ExternalStep:
    """The micro-batches of one step: `accumulation` of them, or fewer at the end of an epoch."""

    samples_known = False  # before the step is over

    def __init__(self, batches: ExternalBatches, plan: BatchPlan, accumulation: int) -> None:
        self.last = False
        self.samples = plan.batch_size // plan.accumulation * accumulation  # expected
        self._batches, self._accumulation = batches, accumulation

    def __iter__(self) -> Iterator[MicroBatch]:
        while self._batches.micro_batches < self._accumulation and not self.last:
            samples = self._batches.take()
            self.last = (
                self._batches.micro_batches == self._accumulation or self._batches.ends_epoch
            )
            yield MicroBatch(None, samples, 0)
