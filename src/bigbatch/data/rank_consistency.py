"""Small collectives on the host, apart from the gradients: numbers, texts, equality of ranks."""

import json
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from bigbatch.data.rank_facts import differences
from bigbatch.errors import RankError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import wide

_MAX_DIFFERENCES = 3  # named in an error


class HostCollectives:
    """Small numbers and bytes of every rank, in one all-reduce.

    Args:
        source: has the ranks, and sums over them; None for one rank.
    """

    def __init__(self, source: GradientSource | None = None) -> None:
        self.rank, self.ranks = (source.rank, source.ranks) if source else (0, 1)
        self._source = source

    def all_gather(self, *values: float, subject: str = "") -> list[list[float]]:
        """The values of every rank, in the order of the ranks. Collective.

        Args:
            values: numbers, equally many on every rank.
            subject: name of the values, for the error of a rank that waits for others in vain.
        """
        if self._source is None or self.ranks == 1:
            return [list(values)]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.ranks, len(values), dtype=wide(device), device=device)
        slots[self.rank] = torch.tensor(values, dtype=slots.dtype)
        try:
            self._source.all_reduce(slots)
        except RuntimeError as error:
            if subject:
                error.add_note(f"bigbatch: the ranks were to compare {subject}")
            raise
        rows: list[list[float]] = slots.tolist()
        return rows

    def all_gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Bytes (uint8) of every rank, in any number, in the order of the ranks. Collective."""
        if self._source is None or self.ranks == 1:
            return [data]
        lengths = [round(length) for (length,) in self.all_gather(len(data))]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.ranks, max(lengths), dtype=torch.uint8, device=device)
        slots[self.rank, : len(data)] = data
        self._source.all_reduce(slots)
        return [row[:length].clone() for row, length in zip(slots.cpu(), lengths, strict=True)]

    def require_equal(
        self, checksums: list[float], subject: str, facts: Callable[[], dict[str, str]]
    ) -> None:
        """Raises RankError, on every rank alike, if the ranks differ; collective if they may.

        Args:
            checksums: checksums of all ranks, known to each; if they are equal nothing is sent.
            subject: name of what is compared.
            facts: the compared values of this rank, by name.
        """
        if len(set(checksums)) <= 1:
            return
        data = torch.frombuffer(bytearray(json.dumps(facts()).encode()), dtype=torch.uint8)
        first, *rest = [json.loads(bytes(row.tolist())) for row in self.all_gather_bytes(data)]
        differing = {
            rank: texts
            for rank, other in enumerate(rest, start=1)
            if (texts := list(differences(first, other)))
        }
        if not differing:
            return  # a checksum may differ although the facts do not
        texts = next(iter(differing.values()))
        more = len(texts) - _MAX_DIFFERENCES
        raise RankError(
            f"rank {', '.join(map(str, differing))} disagrees with rank 0 on {subject}: "
            f"{'; '.join(texts[:_MAX_DIFFERENCES])}{f', and {more} more' if more > 0 else ''}; "
            "give every rank the same settings, and a policy that is a function of "
            "(statistics, now) alone"
        )


def checksum(text: str) -> float:
    """A number for a text, exact in every float type that is reduced."""
    return float(zlib.crc32(text.encode()) & 0xFFFFFF)


def samples_of_rank(samples: int, rank: int, ranks: int) -> int:
    """How many of so many samples a rank has if they are assigned in turn.

    Example:
        >>> [samples_of_rank(10, rank, 4) for rank in range(4)]
        [3, 3, 2, 2]
    """
    return samples // ranks + (rank < samples % ranks)
