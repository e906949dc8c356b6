"""Costs of batch sizes, and whether the advised one is among the best."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from studies.advice_results import WorkloadResult
from studies.timing import Row

PASSING = 1.15  # most cost of an advised size, over that of the best one
REQUIRED = 4  # workloads of five that must pass

Clock = Literal["wall", "cpu"]
CLOCKS: dict[Clock, str] = {"wall": "seconds that passed", "cpu": "seconds of the processor"}


@dataclass(frozen=True)
class Verdict:
    """The costs of one workload: mean number of steps times seconds of a step.

    Args:
        result: what was measured.
        clock: seconds that passed, or seconds of the processor.
    """

    result: WorkloadResult
    clock: Clock = "wall"

    @cached_property
    def costs(self) -> dict[int, float]:
        """Seconds to the target by batch size; infinite where a training failed."""
        sizes = sorted(self.result.sizes.items())
        return {
            size: one.mean_steps * float(getattr(self.result.seconds[size], self.clock))
            for size, one in sizes
        }

    @cached_property
    def best(self) -> int:
        """The size of the sweep with the least cost."""
        return min(self.result.sweep, key=lambda size: self.costs[size])

    def regret(self, size: int | None) -> float:
        """Cost of a size over that of the best one; infinite without a size."""
        least = self.costs[self.best]
        return self.costs[size] / least if size is not None and least < math.inf else math.inf

    @property
    def passes(self) -> bool:
        """Whether the advised size costs at most `PASSING` times the best one."""
        return self.regret(self.result.advised) <= PASSING

    def bracket(self) -> tuple[int, int]:
        """The smallest and the largest size around the best one that would all pass."""
        sweep = sorted(self.result.sweep)
        low = high = sweep.index(self.best)
        while low > 0 and self.regret(sweep[low - 1]) <= PASSING:
            low -= 1
        while high + 1 < len(sweep) and self.regret(sweep[high + 1]) <= PASSING:
            high += 1
        return sweep[low], sweep[high]

    def row(self) -> Row:
        """The row of the table."""
        result, (low, high) = self.result, self.bracket()
        each = ", ".join(str(one.batch_size or "none") for one in result.advice)
        edge = " (at the edge)" if self.best in (min(result.sweep), max(result.sweep)) else ""
        trained = [result.sizes[size] for size in result.sweep]
        return {
            "workload": result.name,
            "present": str(result.present),
            "advised": f"{result.advised or 'none'} ({each})",
            "best": f"{self.best}{edge}",
            "present / best": self._ratio(result.present),
            "advised / best": self._ratio(result.advised),
            "within 15 % of the best": f"{low} to {high}",
            "sizes that failed": f"{sum(math.isinf(one.mean_steps) for one in trained)} of "
            f"{len(trained)}",
            "passes": "yes" if self.passes else "no",
        }

    def _ratio(self, size: int | None) -> str:
        """A ratio and its standard error over seeds."""
        ratio = self.regret(size)
        if size is None or math.isinf(ratio):
            return "failed"
        errors = [self.result.sizes[one].relative_error for one in (size, self.best)]
        return f"{ratio:.2f} ± {0 if size == self.best else ratio * math.hypot(*errors):.2f}"


def verdicts(results: Iterable[WorkloadResult], clock: Clock = "wall") -> Iterator[Verdict]:
    """The verdict of every workload that was measured to its end."""
    for result in results:
        if result.advice and set(result.sweep) <= set(result.sizes) == set(result.seconds):
            yield Verdict(result, clock)


def conclusion(judged: Sequence[Verdict]) -> str:
    """The last line: how many workloads pass."""
    passing = sum(one.passes for one in judged)
    return f"passes on {passing} of {len(judged)}; {REQUIRED} of 5 are required"
