"""Bytes that ranks send in a step, counted at process groups, and step times, by engine.

python -m studies.engines --ranks 2 4 --rounds 5
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from studies.comm_bytes import counting_groups, ring_bytes
from studies.engine_steps import ENGINES, Kind, kinds, step_of
from studies.gloo_processes import on_ranks
from studies.markdown_tables import Row, show
from studies.timing import median_and_range, seconds

_WARMUP = 3  # untimed steps, in which DDP rebuilds its buckets
_MB = 1e6


@dataclass(frozen=True)
class StepCounts:
    """Bytes and time of one kind of step, on the rank that sends most; a row of a table.

    Args:
        input_bytes: bytes of the tensors that the rank passes to each kind of collective; to
            all-gather, its own part.
    """

    kind: Kind
    ranks: int
    input_bytes: dict[str, int]
    sent: float  # bytes that leave the rank, by `ring_bytes`
    collectives: int
    plain: "StepCounts | None" = None  # counts of the baseline; None for a baseline
    ratios: list[float] = field(default_factory=list)  # of time over the baseline's, by round

    def row(self) -> Row:
        """The row of the table."""
        base = self if self.plain is None else self.plain
        return {
            "engine": self.kind.engine,
            "ranks": str(self.ranks),
            "what": self.kind.what,
            "sent, MB": f"{self.sent / _MB:.3f}",
            "sent x plain": f"{self.sent / base.sent:.5f}",
            "collectives": str(self.collectives),
            "step x plain": median_and_range(self.ratios),
        }


def rows(rounds: int, counts: Sequence[int], engines: Sequence[str], width: int) -> Iterator[Row]:
    """Rows of every kind of step on these numbers of ranks, their times interleaved."""
    for ranks in counts:
        for engine in engines:
            team = [replace(kind, width=width) for kind in kinds(engine, ranks)]
            measure = partial(measure_kinds, team, rounds)
            yield from (counts.row() for counts in on_ranks(ranks, measure))


def measure_kinds(team: Sequence[Kind], rounds: int, rank: int) -> Iterator[StepCounts]:
    """Builds and counts every kind of step, then times them in turn. Collective."""
    steps, counts = {}, {}
    for kind in team:
        steps[kind], counts[kind] = _count(kind)
    ratios = _time_ratios(steps, rounds)
    counts = {kind: replace(counts[kind], ratios=ratios[kind]) for kind in team}
    for kind in team:
        base = _baseline(kind, team)
        yield replace(counts[kind], plain=None if base is kind else counts[base])


def _baseline(kind: Kind, team: Iterable[Kind]) -> Kind:
    """The kind that this one is compared with; itself where there is none."""
    bases = (each for each in team if (each.engine, each.what) == (kind.engine, kind.baseline))
    return next(bases, kind)


def _count(kind: Kind) -> tuple[Callable[[], None], StepCounts]:
    """Builds a kind of step; returns it, and what the rank that sends most sends. Collective."""
    step = step_of(kind)
    for _ in range(_WARMUP):
        step()
    for group in counting_groups():
        group.sent.clear()
    step()
    calls = [(group.size(), *call) for group in counting_groups() for call in group.sent]
    sent = sum(ring_bytes(collective, size, ranks) for ranks, collective, size in calls)
    totals: Counter[str] = Counter()
    for _, collective, size in calls:
        totals[collective] += size
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (dict(totals), sent, len(calls)))
    most = max(all_ranks, key=lambda counts: counts[1])
    return step, StepCounts(kind, len(all_ranks), *most)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 3, 4), default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each ratio")
    parser.add_argument("--tiny", action="store_true", help="one round of FSDP2 on two ranks")
    given = parser.parse_args(arguments)
    engines, width = ENGINES, Kind.width
    if given.tiny:
        given.ranks, given.rounds, engines, width = [2], 1, ("FSDP2",), 16
    title = (
        f"gloo, ranks share {os.cpu_count()} cores; median [least, most] of {given.rounds} rounds"
    )
    show(title, rows(given.rounds, given.ranks, engines, width))


if __name__ == "__main__":
    main()
