"""Time ratios within one process: all runs are timed in turn, round after round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Row = dict[str, str]
"""The cells of one row of a table, by column."""


@dataclass(frozen=True)
class Times:
    """Seconds of one run: those that passed, and those of this process on all its CPU cores."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Cost:
    """How much longer something takes than its baseline.

    Args:
        what: the thing and its baseline.
        ratios: one per round.
        floor: the ratio that memory bandwidth allows.
    """

    what: str
    ratios: list[float]
    floor: float

    def row(self) -> Row:
        """The row of the table."""
        middle = median(self.ratios)
        return {
            "what": self.what,
            "ratio": f"{middle:.3f}",
            "least and most": f"{min(self.ratios):.3f} to {max(self.ratios):.3f}",
            "floor": f"{self.floor:.3f}",
            "ratio / floor": f"{middle / self.floor:.2f}",
        }


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The text "median [least, most]"; "-" without values."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of every run in each round, after one warm-up round."""
    return [[times.wall for times in row] for row in interleaved_times(runs, rounds)]


def interleaved_times(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[Times]]:
    """Both times of every run in each round, after one warm-up round."""
    for run in runs:
        run()
    return [[times(run) for run in runs] for _ in range(rounds)]


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one run, including the GPU work that it queues."""
    return times(run).wall


def times(run: Callable[[], object]) -> Times:
    """Both times of one run, including the GPU work that it queues."""
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _synchronize()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
