"""The log of a comparison: what its runs came to, small enough to be kept with the project."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError
from bigbatch.log.history import history_of
from bigbatch.log.time_to_score import evaluations
from bigbatch_recipes.run_config import read_trainings
from bigbatch_recipes.sweep_results import SweepPoint, SweepRun, read_sweep_results
from studies.results.step_cost import StepCost


@dataclass(frozen=True)
class LoggedRun:
    """One training.

    Args:
        arm: its arm.
        lr: its learning rate.
        seed: its seed.
        tuning: whether it only chose the rate.
        failure: why it did not end; "" where it did.
        diverged: whether its loss diverged.
        samples, steps: samples and updates of the whole training.
        seconds: its duration.
        scores: last scores by name; None for one that is not finite.
        spent: samples of branch tests, which are not among `samples`.
        curve: (samples, steps, seconds, main score) at each evaluation; () for a tuning run.
        values: values of other tuned settings than the rate.
    """

    arm: str
    lr: float
    seed: int
    tuning: bool
    failure: str = ""
    diverged: bool = False
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    scores: Mapping[str, float | None] = field(default_factory=dict)
    spent: int = 0
    curve: tuple[tuple[int, int, float, float | None], ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def average_batch(self) -> float:
        """Mean samples of an update."""
        return self.samples / self.steps if self.steps else math.nan

    def score(self, name: str) -> float | None:
        """A last score; None where the run failed, diverged, or has none that is finite."""
        return None if self.failure or self.diverged else self.scores.get(name)


@dataclass(frozen=True)
class RunLog:
    """All trainings of a comparison.

    Args:
        about: recipe, settings, arms, rates and seeds; controls, where they are begun, with the
            values that they are tuned over.
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
        """Names of the arms."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def missing(self) -> dict[str, int]:
        """Runs of each planned arm that neither ended nor failed; without arms that lack none."""
        counts = Counter(run.arm for run in self.runs)
        missing = {arm: self._planned(arm) - counts[arm] for arm in self.planned_arms}
        return {arm: count for arm, count in missing.items() if count > 0}

    def _planned(self, arm: str) -> int:
        """Number of runs of a planned arm; its tuned values are the lists among its changes."""
        changes = {**self.about["arms"], **self.about.get("controls", {})}.get(arm, {})
        tuned = {"lr": self.about["rates"], **changes}.values()
        points = math.prod(len(values) for values in tuned if isinstance(values, list | tuple))
        seeds, tune_seeds = self.about["seeds"], self.about["tune_seeds"]
        return int(points * tune_seeds + seeds if tune_seeds else points * seeds)

    @property
    def planned_arms(self) -> list[str]:
        """Names of the arms, with a run or without; controls once they are begun."""
        planned = (*self.about["arms"], *self.about.get("controls", ()))
        return list(dict.fromkeys([*planned, *self.arms]))

    def fresh(self, arm: str) -> list[LoggedRun]:
        """The runs of an arm that are shown."""
        return [run for run in self.runs if run.arm == arm and not run.tuning]

    def tuning(self, arm: str) -> list[LoggedRun]:
        """The runs of an arm that chose its rate."""
        return [run for run in self.runs if run.arm == arm and run.tuning]

    def rate(self, arm: str) -> float:
        """The rate that was chosen for an arm."""
        return self.fresh(arm)[0].lr

    def at_edge(self, arm: str) -> bool:
        """Whether the chosen rate is the smallest or the largest that was tried."""
        rates = {run.lr for run in self.tuning(arm)}
        return len(rates) > 1 and self.rate(arm) in (min(rates), max(rates))


def logged_runs(path: Path, failures: Mapping[str, str]) -> list[LoggedRun]:
    """The runs of the sweep at `path`; `failures` are the reasons of those that did not end.

    Of a tuned arm the fresh runs have one rate, the best: others are of a sweep that was resumed
    after a run that chose it had failed.
    """
    results = read_sweep_results(path)
    assert results is not None
    shown = {point.name for point in results.shown}
    runs = [
        _logged(point, run, tuning=tuning)
        for point in results.points
        for tuning, finished in ((True, point.tuning), (False, point.runs))
        if tuning or point.name in shown
        for run in finished
        if run.directory.name not in failures
    ]
    trainings = read_trainings(path)
    points = {point.name: point for point in results.points}
    for name, reason in failures.items():
        point, seed = points[trainings[name]["arm"]], trainings[name]["seed"]
        tuning = seed in results.tuning_seeds
        runs.append(LoggedRun(**_identity(point), seed=seed, tuning=tuning, failure=reason))
    return runs


def _logged(point: SweepPoint, run: SweepRun, *, tuning: bool) -> LoggedRun:
    history = history_of(run.directory.path)
    curve = tuple(
        (time.samples, time.steps, round(time.seconds, 2), _rounded(score))
        for time, score in evaluations(history)
    )
    return LoggedRun(
        **_identity(point),
        seed=run.seed,
        tuning=tuning,
        diverged=run.diverged,
        samples=history.rows[-1]["samples"],
        steps=run.steps,
        seconds=round(run.elapsed_seconds, 2),
        scores={name: _rounded(score) for name, score in run.scores.items()},
        curve=() if tuning else curve,
    )


def _identity(point: SweepPoint) -> dict[str, Any]:
    """Arm, rate and other tuned values of a point."""
    others = {name: value for name, value in point.values.items() if name not in ("arm", "lr")}
    return {"arm": str(point.values["arm"]), "lr": float(point.values["lr"]), "values": others}


def _rounded(value: float | None) -> float | None:
    """The value with six digits."""
    return None if value is None else float(f"{value:.6g}")


def log_text(log: RunLog) -> str:
    """A log as JSON, with one run a line."""
    head: dict[str, Any] = {"about": log.about, "higher_is_better": log.higher_is_better}
    head["step_cost"] = asdict(log.step_cost)
    to_json = partial(json.dumps, allow_nan=False)
    runs = ",\n".join(to_json(asdict(run), separators=(",", ":")) for run in log.runs)
    return f'{to_json(head)[:-1]},\n"runs":[\n{runs}\n]}}\n'


def read_log(path: Path) -> RunLog:
    """The log in a file that has `log_text`.

    Raises:
        RunError: the file is not there, or not a log of a comparison.
    """
    try:
        content = json.loads(path.read_bytes())
        runs = [_read_run(run) for run in content.pop("runs")]
        step_cost = StepCost(**content.pop("step_cost"))
        return RunLog(runs=runs, step_cost=step_cost, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not the log of a comparison ({error!r})") from None


def _read_run(values: dict[str, Any]) -> LoggedRun:
    return LoggedRun(**values | {"curve": tuple(map(tuple, values["curve"]))})
