"""Time ratios within one process: all runs are timed in turn, round after round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of one run: those that passed, and those of this process on all its CPU cores."""

    wall: float
    cpu: float


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The text "median [least, most]"; "-" without values."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[Times]]:
    """Both times of every run in each round, after one warm-up round."""
    for run in runs:
        run()
    return [[times(run) for run in runs] for _ in range(rounds)]


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one run, including the GPU work that it queues."""
    return times(run).wall


def times(run: Callable[[], object]) -> Times:
    """Both times of one run, including the GPU work that it queues."""
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    synchronize()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def synchronize() -> None:
    """Waits for the GPU, if one is used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
