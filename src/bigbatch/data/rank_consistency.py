"""Small collectives on the host, apart from the gradients: numbers, texts, equality of ranks."""

import json
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.data.rank_facts import differences
from bigbatch.errors import RankError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import widest_float

_NAMED = 3  # differences named in an error


class HostCollectives:
    """Small numbers of every rank, in one all-reduce.

    Args:
        source: knows the ranks, and adds up over them; None for one rank.
    """

    def __init__(self, source: GradientSource | None = None) -> None:
        self.rank, self.ranks = (source.rank, source.ranks) if source else (0, 1)
        self._source = source

    def gather(self, *values: float, what: str = "") -> list[list[float]]:
        """The values of every rank, in the order of the ranks. Collective.

        Args:
            values: as many on every rank.
            what: they say, for the error of a rank that waits for others in vain.
        """
        if self._source is None or self.ranks == 1:
            return [list(values)]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.ranks, len(values), dtype=widest_float(device), device=device)
        slots[self.rank] = torch.tensor(values, dtype=slots.dtype)
        try:
            self._source.reducer.all_reduce(slots)
        except RuntimeError as error:
            if what:
                error.add_note(f"bigbatch: the ranks were to compare {what}")
            raise
        rows: list[list[float]] = slots.tolist()
        return rows

    def require_equal(
        self, checksums: list[float], what: str, facts: Callable[[], dict[str, str]]
    ) -> None:
        """Raises RankError, on every rank alike, where the ranks differ; collective where they may.

        Args:
            checksums: of the ranks, known to all of them; where they are equal nothing is sent.
            what: they are of.
            facts: what decides, by name, of this rank.
        """
        if len(set(checksums)) <= 1:
            return
        first, *others = self._gather_facts(facts())
        by_rank = [list(differences(first, other)) for other in others]
        ranks = [rank for rank, found in enumerate(by_rank, 1) if found]
        if not ranks:
            return  # a checksum may differ where what it stands for does not
        found = by_rank[ranks[0] - 1]
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise RankError(
            f"rank {', '.join(map(str, ranks))} disagrees with rank 0 on {what}: "
            f"{'; '.join(found[:_NAMED])}{more}; give every rank the same settings, and a policy "
            "that is a function of (statistics, now) alone"
        )

    def _gather_facts(self, facts: dict[str, str]) -> list[dict[str, str]]:
        data = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist())) for row in self.gather_bytes(data)]

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Bytes (uint8) of every rank, in any number, in the order of the ranks. Collective."""
        if self._source is None or self.ranks == 1:
            return [data]
        lengths = [round(length) for (length,) in self.gather(len(data))]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.ranks, max(lengths), dtype=torch.uint8, device=device)
        slots[self.rank, : len(data)] = data
        self._source.reducer.all_reduce(slots)
        return [row[:length].clone() for row, length in zip(slots.cpu(), lengths, strict=True)]


def checksum(text: str) -> float:
    """A number for a text, exact in every float type that is reduced."""
    return float(zlib.crc32(text.encode()) & 0xFFFFFF)


def samples_of_rank(samples: int, rank: int, ranks: int) -> int:
    """How many of so many samples a rank has, where they are assigned in turn.

    Example:
        >>> [samples_of_rank(10, rank, 4) for rank in range(4)]
        [3, 3, 2, 2]
    """
    return samples // ranks + (rank < samples % ranks)
