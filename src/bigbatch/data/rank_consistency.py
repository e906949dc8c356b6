"""Comparison of ranks: small collectives on the host, and what decides a step as text."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import RankError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import widest_float

_MAX_DIFFERENCES = 3  # named in an error
_HALF = 1 << 12  # numbers of half a checksum
LOSS_TOLERANCE = 1e-3  # relative difference of losses of the same samples; kernels may differ

# keys of a parameter group that are no setting, or choose how torch computes the same step
_IGNORED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


# [Note: Agreement of ranks]
# Ranks that decide differently reduce gradients of different steps, or wait for each other for
# ever. So what decides is the same on all ranks by construction, and that is checked:
# - Statistics, loss and samples are sums over the ranks before a policy sees them, and a policy is
#   a function of (statistics, now). No rank decides for the others, and no decision is sent.
# - What a step depends on (settings, target, learning rates, order of the data) is written as text.
#   The sums of its checksum (`checksum_sums`) travel with those that every step reduces anyway, so
#   their number does not grow with the ranks. The texts are gathered where checksums differ.
# - A fault of one rank is raised by all, by numbers that all have. If one alone raised, the others
#   would wait in the next collective until its time-out, and show that error.
# - Each row of an all-reduce over slots is one rank's, as zeros are added to it. Any engine whose
#   reducer can sum can do that; object collectives would need a group, and pickle.
class HostCollectives:
    """Small numbers and bytes of every rank, in one all-reduce: [Note: Agreement of ranks]."""

    def __init__(self, source: GradientSource | None = None) -> None:
        self.rank, self.ranks = (source.rank, source.ranks) if source else (0, 1)
        self.process, self.processes = (source.process, source.processes) if source else (0, 1)
        self._source = source

    def all_gather(self, *values: float, subject: str = "") -> list[list[float]]:
        """The values of every process, in the order of the ranks. Collective."""
        if self._source is None or self.processes == 1:
            return [list(values)]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.processes, len(values), dtype=widest_float(device), device=device)
        slots[self.process] = torch.tensor(values, dtype=slots.dtype)
        self._all_reduce(slots, subject)
        rows: list[list[float]] = slots.tolist()
        return rows

    def sum(self, *values: float, subject: str = "") -> list[float]:
        """The values, summed over the processes. Collective."""
        if self._source is None or self.processes == 1:
            return list(values)
        device = self._source.parameters[0].device
        sums = torch.tensor(values, dtype=widest_float(device), device=device)
        self._all_reduce(sums, subject)
        totals: list[float] = sums.tolist()
        return totals

    def _all_reduce(self, values: Tensor, subject: str) -> None:
        assert self._source is not None
        try:
            self._source.reducer.all_reduce(values)
        except RuntimeError as error:
            if subject:
                error.add_note(f"bigbatch: the ranks were to compare {subject}")
            raise

    def of_ranks(self, rows: list[list[float]], subject: str) -> list[list[float]]:
        """The values of every rank, from those of every process.

        Raises:
            RankError: the processes of a rank, a tensor-parallel group, have different ones.
        """
        size = self.processes // self.ranks
        for place in range(0, self.processes, size):
            require_same_samples(rows[place : place + size], place, subject)
        return rows[::size]

    def require_same_losses(self, loss: float) -> None:
        """Raises RankError if the processes of a rank had different losses. Collective."""
        size, losses = self.processes // self.ranks, [loss for (loss,) in self.all_gather(loss)]
        for place in range(0, self.processes, size):
            values = losses[place : place + size]
            if max(values) - min(values) > LOSS_TOLERANCE * max(map(abs, values)):
                require_same_samples(values, place, "the loss of a step")

    def all_gather_bytes(self, data: Tensor) -> list[Tensor]:
        """Bytes (uint8) of every process, in any number, in the order of the ranks. Collective."""
        if self._source is None or self.processes == 1:
            return [data]
        lengths = [round(length) for (length,) in self.all_gather(len(data))]
        device = self._source.parameters[0].device
        slots = torch.zeros(self.processes, max(lengths), dtype=torch.uint8, device=device)
        slots[self.process, : len(data)] = data
        self._source.reducer.all_reduce(slots)
        return [row[:length].clone() for row, length in zip(slots.cpu(), lengths, strict=True)]

    def require_equal(self, subject: str, facts: Callable[[], dict[str, str]]) -> None:
        """Raises RankError, on every rank alike, if the ranks differ. Collective.

        Args:
            subject: name of what is compared.
            facts: the compared values of this rank, by name.
        """
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


def require_same_samples(values: Sequence[Any], first: int, subject: str) -> None:
    """Raises RankError unless the processes of a tensor-parallel group, from `first` on, agree."""
    if any(value != values[0] for value in values):
        found = ", ".join(str(value) for value in values)
        raise RankError(
            f"processes {first} to {first + len(values) - 1} are one tensor-parallel group, and "
            f"differ in {subject} ({found}), so they have different samples; give all of a group "
            'the same: a sampler with num_replicas=mesh["dp"].size() and '
            'rank=mesh.get_local_rank("dp"), and generators with the same seed'
        )


def checksum(text: str) -> float:
    """A number for a text, exact in every float type that is reduced."""
    return float(zlib.crc32(text.encode()) & 0xFFFFFF)


CHECKSUM_SUMS = 4
"""How many numbers `checksum_sums` returns."""


def checksum_sums(checksum: float) -> list[float]:
    """[x, x^2, y, y^2] of both halves of a checksum; `are_equal` reads their sums over the ranks.

    They are below 2^24, so sums over up to 2^29 ranks are exact in float64.
    """
    high, low = divmod(checksum, _HALF)
    return [high, high * high, low, low * low]


def are_equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether the checksums of all ranks are equal, from the sums of their `checksum_sums`.

    Exact: sum x^2 W = (sum x)^2 only where all x are equal. True without sums, of one process.

    Example:
        >>> are_equal([a + b for a, b in zip(checksum_sums(5.0), checksum_sums(5.0))], ranks=2)
        True
        >>> are_equal([a + b for a, b in zip(checksum_sums(5.0), checksum_sums(6.0))], ranks=2)
        False
    """
    exact = list(map(int, sums))
    return all(q * ranks == x * x for x, q in zip(exact[::2], exact[1::2], strict=True))


def samples_of_rank(samples: int, rank: int, ranks: int) -> int:
    """How many of so many samples a rank has if they are assigned in turn.

    Example:
        >>> [samples_of_rank(10, rank, 4) for rank in range(4)]
        [3, 3, 2, 2]
    """
    return samples // ranks + (rank < samples % ranks)


def facts_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value of nested mappings as text.

    Example:
        >>> facts_of({"target": 64, "settings": {"every": 1}})
        {'target': '64', 'settings.every': '1'}
    """
    facts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            facts |= facts_of(value, f"{prefix}{name}.")
        else:
            facts[f"{prefix}{name}"] = value if isinstance(value, str) else repr(value)
    return facts


def optimizer_facts(optimizer: Optimizer, description: str, *, waits: bool) -> dict[str, str]:
    """Class and settings of all parameter groups, learning rates among them.

    Args:
        optimizer: the optimizer that has the groups.
        description: its class, and what it consists of.
        waits: whether to wait for numbers on a GPU; if not, their number of writes stands for
            them.
    """
    facts = {"the optimizer": description}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the parameters of group {number}"] = f"{len(group['params'])} tensors"
        for name, value in group.items():
            if name not in _IGNORED and (text := _text(value, waits=waits)) is not None:
                facts[f"{name} of parameter group {number}"] = text
    return facts


def differences(rank0: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """A text for each fact that differs, with both values."""
    for name in dict.fromkeys([*rank0, *other]):
        expected, value = rank0.get(name, "missing"), other.get(name, "missing")
        if expected != value:
            yield f"{name} is {value} there and {expected} on rank 0"


def _text(value: Any, *, waits: bool) -> str | None:
    """A value as text if it is the same in every process; None for any other object."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        readable = waits or value.is_cpu
        return repr(value.item()) if readable else f"a tensor, written {value._version} times"
    if isinstance(value, list | tuple):
        texts = [_text(item, waits=waits) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, float):
        return repr(float(value))  # a NumPy float too
    return repr(value) if value is None or isinstance(value, int | str) else None
