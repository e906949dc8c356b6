"""Bytes that ranks send in a step, counted at process groups and sockets; time and memory."""

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from studies.comm_bytes import CountingGroup, counting_groups, ring_bytes
from studies.gloo_processes import on_ranks
from studies.socket_bytes import SocketBytes
from studies.step_kinds import ENGINES, Kind, kinds, step_of
from studies.timing import Row, median_and_range, seconds

RANKS = (2, 3, 4)
_WARMUP = 3  # untimed steps, in which DDP rebuilds its buckets
_MB = 1e6


@dataclass(frozen=True)
class StepCounts:
    """Bytes, memory and time of one kind of step; a row of a table.

    Args:
        kind: the kind of step.
        ranks: number of ranks.
        input_bytes: bytes of the tensors that the rank that sends most passes to each kind of
            collective among "all" ranks, those of a "node", or those "across" nodes; to all-gather,
            its own part.
        sent: bytes that leave that rank, by `ring_bytes`.
        collectives: number of collectives.
        socket_bytes: bytes that the sockets of each rank send to each rank; None where unknown.
        peak: peak resident memory in a step minus the memory before the model was built, in bytes,
            of the rank with the most; None where unknown.
        plain: counts of the baseline; None for a baseline.
        ratios: step time over that of the baseline, one per round.
    """

    kind: Kind
    ranks: int
    input_bytes: dict[tuple[str, str], int]
    sent: float
    collectives: int
    socket_bytes: list[list[int]] | None
    peak: int | None
    plain: "StepCounts | None" = None
    ratios: list[float] = field(default_factory=list)

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that the rank with the most sends to all others over its sockets."""
        return None if self.socket_bytes is None else max(map(sum, self.socket_bytes))

    @property
    def between_nodes(self) -> int | None:
        """Bytes that the first two of four ranks send to the others, as if they were two nodes."""
        if self.socket_bytes is None or self.ranks != 4:
            return None
        return sum(sum(to_ranks[2:]) for to_ranks in self.socket_bytes[:2])

    def row(self) -> Row:
        """The row of the table."""
        base = self if self.plain is None else self.plain
        wire, base_wire, between = self.wire_bytes, base.wire_bytes, self.between_nodes
        extra_memory = None
        if self.plain is not None and self.peak is not None and base.peak is not None:
            extra_memory = self.peak - base.peak
        return {
            "engine": self.kind.engine,
            "ranks": str(self.ranks),
            "what": self.kind.what,
            "sent, MB": f"{self.sent / _MB:.3f}",
            "sent x plain": f"{self.sent / base.sent:.5f}",
            "on the wire, MB": "not available" if wire is None else f"{wire / _MB:.3f}",
            "wire x plain": "-" if wire is None or not base_wire else f"{wire / base_wire:.4f}",
            "between nodes, MB": "-" if between is None else f"{between / _MB:.3f}",
            "collectives": str(self.collectives),
            "step x plain": median_and_range(self.ratios),
            "memory over plain, MB": "-" if extra_memory is None else f"{extra_memory / _MB:.0f}",
        }


def costs(rounds: int, counts: Sequence[int] = RANKS) -> Iterator[Row]:
    """Rows of every kind of step on these numbers of ranks, their times interleaved."""
    for ranks in counts:
        for engine in ENGINES:
            measure = partial(measure_kinds, kinds(engine, ranks), rounds)
            yield from (counts.row() for counts in on_ranks(ranks, measure))


def measure_kinds(team: Sequence[Kind], rounds: int, rank: int) -> Iterator[StepCounts]:
    """Builds and counts every kind of step, then times them in turn. Collective."""
    sockets = SocketBytes()
    step_of(team[0])()  # allocates what a process keeps from its first step on
    steps, counts = {}, {}
    for kind in team:
        steps[kind], counts[kind] = _count(kind, sockets)
    ratios = _time_ratios(steps, rounds)
    counts = {kind: replace(counts[kind], ratios=ratios[kind]) for kind in team}
    for kind in team:
        base = _baseline(kind, team)
        yield replace(counts[kind], plain=None if base is kind else counts[base])


def _baseline(kind: Kind, team: Iterable[Kind]) -> Kind:
    """The kind that this one is compared with; itself where there is none."""
    bases = (each for each in team if (each.engine, each.what) == (kind.engine, kind.baseline))
    return next(bases, kind)


def _count(kind: Kind, sockets: SocketBytes) -> tuple[Callable[[], None], StepCounts]:
    """Builds a kind of step; returns it, and what it sends and keeps. Collective."""
    memory_before = _resident_memory()
    step = step_of(kind)
    for _ in range(_WARMUP):
        step()
    for group in counting_groups():
        group.sent.clear()
    sockets.start()
    step()
    calls = [(group, *call) for group in counting_groups() for call in group.sent]
    to_ranks = sockets.sent()
    sent = sum(ring_bytes(collective, size, group.size()) for group, collective, size in calls)
    local = (_input_bytes(calls), sent, len(calls), to_ranks, _peak_memory(step, memory_before))
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, local)
    input_bytes, sent, collectives, _, _ = max(all_ranks, key=lambda counts: counts[1])
    socket_bytes, peaks = ([counts[i] for counts in all_ranks] for i in (3, 4))
    return step, StepCounts(
        kind,
        len(all_ranks),
        input_bytes,
        sent,
        collectives,
        None if None in socket_bytes else socket_bytes,
        None if None in peaks else max(peaks),
    )


def _input_bytes(calls: list[tuple[CountingGroup, str, int]]) -> dict[tuple[str, str], int]:
    totals: Counter[tuple[str, str]] = Counter()
    for group, collective, size in calls:
        totals[collective, _group_kind(group)] += size
    return dict(totals)


def _group_kind(group: CountingGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return "all"
    return "node" if ranks[-1] - ranks[0] < len(ranks) else "across"


def _time_ratios(steps: Mapping[Kind, Callable[[], None]], rounds: int) -> dict[Kind, list[float]]:
    """Ratios of step times to the baseline's, which is timed at both ends of a round.

    The ratio of a baseline is its second time over its first.
    """

    def time_step(kind: Kind) -> float:
        dist.barrier()
        return seconds(lambda: (steps[kind](), dist.barrier()))

    bases = {kind: _baseline(kind, steps) for kind in steps}
    ratios: dict[Kind, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        first = {kind: time_step(kind) for kind in steps}
        # in one order on all ranks
        last = {base: time_step(base) for base in dict.fromkeys(bases.values())}
        for kind, base in bases.items():
            base_mean = (first[base] + last[base]) / 2
            is_base = base is kind
            ratios[kind].append(last[kind] / first[kind] if is_base else first[kind] / base_mean)
    return ratios


def _resident_memory(peak: bool = False) -> int | None:
    """Bytes of resident memory of this process, after free memory is returned; or its peak."""
    if not peak:
        gc.collect()
        with suppress(OSError, AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return 1024 * int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0])


def _peak_memory(step: Callable[[], None], memory_before: int | None) -> int | None:
    """Peak memory of one step minus the memory before, in bytes; None where unknown."""
    _resident_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
    except OSError:
        memory_before = None
    step()
    peak = _resident_memory(peak=True)
    return None if memory_before is None or peak is None else peak - memory_before
