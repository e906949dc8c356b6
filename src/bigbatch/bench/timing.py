"""Ratios inside one run: everything is timed in turn, round after round."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

COLUMNS = ("what", "ratio", "least and most", "floor", "ratio / floor")


@dataclass(frozen=True)
class Cost:
    """How much longer `what` takes than its baseline.

    Args:
        what: the thing and its baseline.
        ratios: one per round.
        floor: the ratio that the bytes to be moved allow.
    """

    what: str
    ratios: list[float]
    floor: float

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        middle = median(self.ratios)
        return (
            self.what,
            f"{middle:.3f}",
            f"{min(self.ratios):.3f} to {max(self.ratios):.3f}",
            f"{self.floor:.3f}",
            f"{middle / self.floor:.2f}",
        )


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of every run in each round, after one round that is not counted."""
    for run in runs:
        run()
    return [[seconds(run) for run in runs] for _ in range(rounds)]


def seconds(run: Callable[[], object]) -> float:
    """Of one run, to the end of what it leaves to a GPU."""
    _wait()
    start = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
