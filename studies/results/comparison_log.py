"""The log of a comparison: what its runs came to, small enough to be kept with the project."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError
from studies.results.step_cost import StepCost


@dataclass(frozen=True)
class LoggedRun:
    """One training."""

    arm: str
    lr: float
    seed: int
    tuning: bool  # whether it only chose the rate
    failure: str = ""  # why it did not end
    diverged: bool = False
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    scores: Mapping[str, float | None] = field(default_factory=dict)  # None: not finite
    spent: int = 0  # samples of branch tests of a policy that is gone
    # (samples, steps, seconds, main score) at each evaluation; () for a tuning run
    curve: tuple[tuple[int, int, float, float | None], ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)  # of other tuned settings

    @property
    def average_batch(self) -> float:
        """Mean samples of an update."""
        return self.samples / self.steps if self.steps else math.nan

    @property
    def main_score(self) -> float | None:
        """Its own main score, which is the held-out one of a tuning run."""
        return self.score(next(iter(self.scores), ""))

    def score(self, name: str) -> float | None:
        """A last score; None where the run failed, diverged, or has none that is finite."""
        return None if self.failure or self.diverged else self.scores.get(name)


@dataclass(frozen=True)
class ComparisonLog:
    """All trainings of a comparison.

    Args:
        about: recipe, settings, arms, rates and seeds.
        higher_is_better: whether a higher main score is better.
        step_cost: seconds of a step of a plain loop.
        runs: the trainings.
    """

    about: Mapping[str, Any]
    higher_is_better: bool
    step_cost: StepCost
    runs: list[LoggedRun]

    @property
    def score_names(self) -> list[str]:
        """Names of the scores of fresh runs; the first is the main score.

        Raises:
            RunError: no fresh run has a score.
        """
        names = [name for run in self.runs if not run.tuning for name in run.scores]
        if not names:
            raise RunError("no run of the log has a score; train again what failed")
        return list(dict.fromkeys(names))

    @property
    def score(self) -> str:
        """Name of the main score of fresh runs."""
        return self.score_names[0]

    @property
    def arms(self) -> list[str]:
        """Names of the arms of which a shown run has ended or failed."""
        return list(dict.fromkeys(run.arm for run in self.runs if not run.tuning))

    def fresh(self, arm: str) -> list[LoggedRun]:
        """The runs of an arm that are shown."""
        return [run for run in self.runs if run.arm == arm and not run.tuning]

    def tuning(self, arm: str) -> list[LoggedRun]:
        """The runs of an arm that chose its rate."""
        return [run for run in self.runs if run.arm == arm and run.tuning]

    def rate(self, arm: str) -> float:
        """The rate that was chosen for an arm."""
        return self.fresh(arm)[0].lr

    def rate_text(self, arm: str) -> str:
        """That rate, and whether it is the smallest or the largest that was tried."""
        rates = {run.lr for run in self.tuning(arm)}
        at_edge = len(rates) > 1 and self.rate(arm) in (min(rates), max(rates))
        return f"{self.rate(arm):g}" + " (edge)" * at_edge

    def scores(self, arm: str, score: str | None = None) -> dict[int, float | None]:
        """The last scores of the fresh runs of an arm, by seed."""
        return {run.seed: run.score(score or self.score) for run in self.fresh(arm)}


def log_text(log: ComparisonLog) -> str:
    """A log as JSON, with one run a line."""
    head: dict[str, Any] = {"about": log.about, "higher_is_better": log.higher_is_better}
    head["step_cost"] = asdict(log.step_cost)
    to_json = partial(json.dumps, allow_nan=False)
    runs = ",\n".join(to_json(asdict(run), separators=(",", ":")) for run in log.runs)
    return f'{to_json(head)[:-1]},\n"runs":[\n{runs}\n]}}\n'


def read_log(path: Path) -> ComparisonLog:
    """The log in a file that has `log_text`.

    Raises:
        RunError: the file is not there, or not a log of a comparison.
    """
    try:
        content = json.loads(path.read_bytes())
        runs = [
            LoggedRun(**run | {"curve": tuple(map(tuple, run["curve"]))})
            for run in content.pop("runs")
        ]
        step_cost = StepCost(**content.pop("step_cost"))
        return ComparisonLog(runs=runs, step_cost=step_cost, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not the log of a comparison ({error!r})") from None
