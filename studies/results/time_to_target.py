"""Time to a target score on a modelled cluster, and ratios of it between arms, paired by seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bigbatch.errors import RunError
from bigbatch.log.paired_differences import PairedDifference, paired_difference
from bigbatch.log.time_to_score import reaches
from studies.results.run_log import LoggedRun, RunLog


@dataclass(frozen=True)
class TargetTimes:
    """Modelled seconds of an arm's fresh runs to a target.

    Args:
        seconds: by seed; None for a run that does not reach it.
    """

    seconds: dict[int, float | None]

    @property
    def reached(self) -> int:
        """Number of runs that reach the target."""
        return sum(value is not None for value in self.seconds.values())

    @property
    def median(self) -> float:
        """Median over all runs, with infinity for those that do not reach the target."""
        values = sorted(math.inf if one is None else one for one in self.seconds.values())
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        return (low + high) / 2

    def log_ratio_to(self, other: "TargetTimes") -> PairedDifference:
        """Differences of ln(seconds) by seed; pairs that lack a time are counted."""
        return paired_difference(_logs(self), _logs(other))


def _logs(times: TargetTimes) -> dict[int, float | None]:
    return {seed: None if one is None else math.log(one) for seed, one in times.seconds.items()}


def to_target(run: LoggedRun, target: float, *, higher_is_better: bool) -> tuple[int, int] | None:
    """(steps, samples) at the first evaluation that reaches the target; None if none does."""
    for samples, steps, _, score in () if run.diverged else run.curve:
        if reaches(score, target, higher_is_better=higher_is_better):
            return steps, samples
    return None


def times_to(log: RunLog, arm: str, target: float, devices: int) -> TargetTimes:
    """Modelled seconds of the fresh runs of an arm; runs that failed reach no target."""
    seconds: dict[int, float | None] = {}
    for run in log.fresh(arm):
        position = to_target(run, target, higher_is_better=log.higher_is_better)
        seconds[run.seed] = position and log.step_cost.seconds(*position, devices)
    return TargetTimes(seconds)


def tuned_score(log: RunLog, arm: str) -> float:
    """Mean main score of the tuning runs of an arm at the rate that was chosen.

    Raises:
        RunError: none of them has one.
    """
    runs = [run for run in log.tuning(arm) if run.lr == log.rate(arm)]
    scores = [run.score(name) for run in runs for name in list(run.scores)[:1]]
    if not (known := [score for score in scores if score is not None]):
        raise RunError(f"no tuning run of {arm} has a score; train again what failed")
    return fmean(known)


def fastest(log: RunLog, arms: Sequence[str], target: float, devices: int) -> str:
    """The arm with the least median time; of several, the first that reaches it most often."""

    def order(arm: str) -> tuple[float, int]:
        times = times_to(log, arm, target, devices)
        return times.median, -times.reached

    return min(arms, key=order)
