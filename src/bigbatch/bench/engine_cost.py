"""What ranks send in a step, counted at the process group and at the sockets, and what it costs."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from bigbatch.bench.comm_bytes import CountingGroup, counting_groups, moved
from bigbatch.bench.gloo_processes import on_ranks
from bigbatch.bench.socket_bytes import Wire
from bigbatch.bench.step_kinds import ENGINES, Kind, kinds, step_of
from bigbatch.bench.timing import seconds

COLUMNS = (
    "engine",
    "ranks",
    "what",
    "sent, MB",
    "x plain",
    "on the wire, MB",
    "x plain",
    "between nodes, MB",
    "collectives",
    "step x plain",
    "memory over plain, MB",
)
RANKS = (2, 3, 4)
_WARM = 3  # steps, in which DDP makes its buckets again
_MB = 1e6


@dataclass(frozen=True)
class Counted:
    """What one kind of step sends and keeps; a row of a table.

    Args:
        kind: it.
        ranks: how many.
        handed: bytes that the rank that sends most hands to each kind of collective among "all"
            ranks, those of a "node", or those "across" nodes; to all-gather, its own part.
        sent: bytes that leave it, by `moved`.
        collectives: how many there are.
        wire: bytes that its sockets send to each rank, for each rank; None where unknown.
        peak: largest resident memory in a step over that before anything of the kind was made, in
            bytes, of the rank with the most; None where unknown.
        plain: what it is compared with; None for itself.
        ratios: of step times to plain's, one a round.
    """

    kind: Kind
    ranks: int
    handed: dict[tuple[str, str], int]
    sent: float
    collectives: int
    wire: list[list[int]] | None
    peak: int | None
    plain: "Counted | None" = None
    ratios: list[float] = field(default_factory=list)

    @property
    def on_wire(self) -> int | None:
        """Bytes that the rank with the most sends to all others."""
        return None if self.wire is None else max(map(sum, self.wire))

    @property
    def between(self) -> int | None:
        """Bytes that the first two of four ranks send to the others, as two nodes would be."""
        if self.wire is None or self.ranks != 4:
            return None
        return sum(sum(to[2:]) for to in self.wire[:2])

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        base = self if self.plain is None else self.plain
        wire, base_wire = self.on_wire, base.on_wire
        spread = [self.peak, base.peak]
        return (
            self.kind.engine,
            str(self.ranks),
            self.kind.what,
            f"{self.sent / _MB:.3f}",
            f"{self.sent / base.sent:.5f}",
            "not available" if wire is None else f"{wire / _MB:.3f}",
            "-" if wire is None or not base_wire else f"{wire / base_wire:.4f}",
            "-" if self.between is None else f"{self.between / _MB:.3f}",
            str(self.collectives),
            _spread(self.ratios),
            "-" if None in spread or self.plain is None else f"{(spread[0] - spread[1]) / _MB:.0f}",  # type: ignore[operator]
        )


def costs(rounds: int, counts: Sequence[int] = RANKS) -> Iterator[Counted]:
    """Every kind of step on so many ranks, their times interleaved."""
    for ranks in counts:
        for engine in ENGINES:
            yield from on_ranks(ranks, partial(measured, kinds(engine, ranks), rounds))


def measured(team: Sequence[Kind], rounds: int, rank: int) -> Iterator[Counted]:
    """Every kind is made, counted and kept; then they take turns. Runs on every rank."""
    wire = Wire()
    step_of(team[0])()  # what a process takes at its first step, it keeps
    made = [_counted(kind, wire) for kind in team]
    ratios = _times({kind: step for kind, (step, _) in zip(team, made, strict=True)}, rounds)
    seen = {
        kind: replace(counted, ratios=ratios[kind])
        for kind, (_, counted) in zip(team, made, strict=True)
    }
    for kind, counted in seen.items():
        base = _base_of(kind, team)
        yield replace(counted, plain=None if base is kind else seen[base])


def _base_of(kind: Kind, team: Iterable[Kind]) -> Kind:
    """What it is compared with, or itself."""
    bases = (each for each in team if (each.engine, each.what) == (kind.engine, kind.baseline))
    return next(bases, kind)


def _counted(kind: Kind, wire: Wire) -> tuple[Callable[[], None], Counted]:
    before = _resident()
    step = step_of(kind)
    for _ in range(_WARM):
        step()
    for group in counting_groups():
        group.sent.clear()
    wire.start()
    step()
    sent = [(group, *each) for group in counting_groups() for each in group.sent]
    to_ranks = wire.sent()
    local = (_handed(sent), _moved(sent), len(sent), to_ranks, _peak_of(step, before))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local)
    handed, moves, collectives, _, _ = max(every, key=lambda of_rank: of_rank[1])
    wires, peaks = ([of_rank[i] for of_rank in every] for i in (3, 4))
    return step, Counted(
        kind,
        len(every),
        handed,
        moves,
        collectives,
        None if None in wires else wires,
        None if None in peaks else max(peaks),
    )


_Sent = list[tuple[CountingGroup, str, int]]


def _handed(sent: _Sent) -> dict[tuple[str, str], int]:
    totals: dict[tuple[str, str], int] = {}
    for group, collective, size in sent:
        key = collective, _where(group)
        totals[key] = totals.get(key, 0) + size
    return totals


def _where(group: CountingGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return "all"
    return "node" if ranks[-1] - ranks[0] < len(ranks) else "across"


def _moved(sent: _Sent) -> float:
    return sum(moved(collective, size, group.size()) for group, collective, size in sent)


def _times(steps: Mapping[Kind, Callable[[], None]], rounds: int) -> dict[Kind, list[float]]:
    """Ratios to what each is compared with, which is timed at both ends of a round.

    What is compared with nothing has its second time over its first.
    """

    def timed(kind: Kind) -> float:
        dist.barrier()
        return seconds(lambda: (steps[kind](), dist.barrier()))

    bases = {kind: _base_of(kind, steps) for kind in steps}
    ratios: dict[Kind, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        first = {kind: timed(kind) for kind in steps}
        last = {
            kind: timed(kind) for kind in dict.fromkeys(bases.values())
        }  # in one order on all ranks
        for kind, base in bases.items():
            apart = (first[base] + last[base]) / 2
            ratios[kind].append(last[kind] / first[kind] if base is kind else first[kind] / apart)
    return ratios


def _resident(peak: bool = False) -> int | None:
    """Bytes of resident memory of this process, after giving back what is free; or its peak."""
    if not peak:
        gc.collect()
        with suppress(OSError, AttributeError):  # glibc has it
            ctypes.CDLL(None).malloc_trim(0)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return 1024 * int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0])


def _peak_of(step: Callable[[], None], before: int | None) -> int | None:
    """Of one step, over what there was before; Linux forgets the last peak where it is asked."""
    _resident()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        before = None
    step()
    peak = _resident(peak=True)
    return None if before is None or peak is None else peak - before


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
