"""What all ranks must agree on before a step is taken."""

from collections.abc import Callable
from typing import Any

from bigbatch.data.rank_consistency import HostCollectives, checksum, facts_of
from bigbatch.errors import LoopError

SUBJECT = "what decides a step"


class RankFacts:
    """Compares what decides a step between the ranks: [Note: Agreement of ranks].

    Every step of which all is measured sends a checksum of the facts with its sums. It is of the
    state before the decision, so it tells of a difference one step after it came up, before the
    optimizer steps. Seconds differ between ranks; decisions use their mean, sent with it.

    Args:
        collectives: the other ranks.
        facts: gives the facts by name, which may be mappings of others; called with False without
            a wait for the device.
    """

    def __init__(self, collectives: HostCollectives, facts: Callable[..., dict[str, Any]]) -> None:
        self.collectives = collectives
        self._facts = facts
        self._weightings: set[int] = set()  # of each rank, once it was asked

    def checksum(self, *, waits: bool = False) -> float:
        """A checksum of the facts; 0 for one rank, which has nothing to compare."""
        return checksum(repr(self._facts(waits))) if self.collectives.ranks > 1 else 0.0

    def compare(self, checksums: list[float]) -> None:
        """Raises RankError if the checksums of a step differ."""
        self.collectives.require_equal(checksums, SUBJECT, self._texts)

    def require_equal(self, subject: str) -> None:
        """Raises RankError if the ranks differ in what decides a step. Collective."""
        if self.collectives.ranks > 1:
            rows = self.collectives.all_gather(self.checksum(waits=True), subject=subject)
            self.collectives.require_equal([value for (value,) in rows], subject, self._texts)

    def _texts(self) -> dict[str, str]:
        return facts_of(self._facts())

    def require_same_weighting(self, weighting: int) -> None:
        """Raises LoopError unless losses are weighted alike everywhere; collective at first."""
        if not self._weightings:
            self._weightings = {round(value) for (value,) in self.collectives.all_gather(weighting)}
        if self._weightings != {weighting}:
            raise LoopError(
                "weight= is given on some ranks, or in some steps, and not in others; if "
                "gradients are sharded a variance-reduced optimizer needs it always or never"
            )
