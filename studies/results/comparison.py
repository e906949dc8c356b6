"""A comparison of arms: every arm at its own best learning rate, on fresh seeds.

Rates are tuned on held-out training samples and on seeds of their own, as `bigbatch sweep --tune lr
--tune-seeds` does it. Controls, which need runs of other arms, are trained after them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.history import history_of
from bigbatch.log.time_to_score import evaluations
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.parallel_runs import train_sweep
from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.run_config import STUDY, read_study
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.study import settings_from, start_sweep, trainings_of
from bigbatch_recipes.sweep import Point
from bigbatch_recipes.sweep_results import SweepPoint, SweepResults, SweepRun, read_sweep_results
from bigbatch_recipes.validate import require_trainable
from studies.results.comparison_log import ComparisonLog, LoggedRun
from studies.results.step_cost import StepCost, measure_step_cost

Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms of one recipe.

    Args:
        name: name of the log.
        recipe: name of the recipe.
        settings: changes of its small scale, for all arms.
        arms: changes of each arm; a plain loop's step time may be among them. A tuple is the values
            that a setting is tuned over.
        rates: learning rates that an arm is tuned over if it has none of its own.
        seeds: fresh seeds of each arm, from 0; of each arm and rate without tuning.
        tune_seeds: seeds that choose the tuned values; 0 to train and show every one.
        controls: further arms, which follow from the results of the arms.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any]
    arms: Callable[[StepCost], Arms]
    rates: Sequence[float] = ()
    seeds: int
    tune_seeds: int = 0
    controls: Callable[[SweepResults], Arms] = lambda _: {}

    def train(self, folder: Path, data: Path | None, jobs: int | None) -> ComparisonLog:
        """Trains what is missing in `folder`, and collects what is there at the end.

        Args:
            folder: folder of the runs.
            data: folder of data folders.
            jobs: runs at a time; None for as many as the cores allow.
        Raises:
            RunError: data are missing, or a file in `folder` is damaged or of other trainings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        recipe = get_recipe(self.recipe)
        settings = self.recipe_settings(str(recipe.origin.find(data) or ""))
        cost = _step_cost(
            folder / "step_cost.json", lambda: measure_step_cost(recipe, settings, (32, 128, 512))
        )
        arms = self.arms(cost)
        runs, results = self._trained(folder / "arms", arms, settings, jobs)
        about = {
            "recipe": self.recipe,
            "settings": dict(self.settings),
            "arms": arms,
            "rates": list(self.rates),
            "seeds": self.seeds,
            "tune_seeds": self.tune_seeds,
        }
        if controls := self.controls(results):
            runs += self._trained(folder / "controls", controls, settings, jobs)[0]
        return ComparisonLog(about, recipe.higher_is_better, cost, runs)

    def points(self, arms: Arms, settings: Settings) -> list[Point]:
        """One point for each arm and combination of its tuned values.

        Raises:
            SettingError: a setting is unknown or invalid.
        """
        points = []
        for arm, changes in arms.items():
            own = {name: values for name, values in changes.items() if isinstance(values, tuple)}
            tuned = {"lr": tuple(self.rates), **own}
            for combination in product(*tuned.values()):
                values = dict(zip(tuned, combination, strict=True))
                name = ",".join((arm, *(f"{key}={value:g}" for key, value in values.items())))
                changed = settings.with_changes({**changes, **values})
                points.append(Point(name, {"arm": arm, **values}, changed))
        require_trainable(get_recipe(self.recipe), *(point.settings for point in points))
        return points

    def recipe_settings(self, data: str) -> Settings:
        """The settings that all arms change, with the data in this folder."""
        return get_recipe(self.recipe).settings().with_changes({**self.settings, "data": data})

    def _trained(
        self, path: Path, arms: Arms, settings: Settings, jobs: int | None
    ) -> tuple[list[LoggedRun], SweepResults]:
        """The runs of the sweep of these arms at `path`, which are trained if they are not."""
        recipe, points = get_recipe(self.recipe), self.points(arms, settings)
        if path.exists():
            _require_trainings(path, trainings_of(recipe, points, self.seeds, self.tune_seeds))
        else:
            names = dict.fromkeys(name for point in points for name in point.values)
            tuned = [name for name in names if name != "arm"] if self.tune_seeds else []
            start_sweep(recipe, path, points, tuned, self.seeds, self.tune_seeds)
        failures = train_sweep(path, jobs, LiveView())
        results = read_sweep_results(path)
        return logged_runs(results, failures), results


def _require_trainings(path: Path, expected: Mapping[str, Settings]) -> None:
    """Raises RunError where the study at `path` has other trainings, as of older code."""
    file = path / STUDY
    actual = {
        name: settings_from(f"{file}, training {name}", values)
        for name, values in read_study(path).trainings.items()
    }
    if actual != expected:
        raise RunError(f"{file} has other trainings than this comparison; move {path} away")


def _step_cost(path: Path, measure: Callable[[], StepCost]) -> StepCost:
    """The step cost in the file; measured and written where there is none."""
    if not path.exists():
        write_atomically(path, json.dumps(asdict(measure())).encode())
    try:
        return StepCost(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not the cost of a step ({error}); move it away") from None


def logged_runs(results: SweepResults, failures: Mapping[str, str]) -> list[LoggedRun]:
    """The runs of a sweep; `failures` are the reasons of those that did not end.

    Of a tuned arm the fresh runs have one rate, the best: others are of a sweep that was resumed
    after a run that chose it had failed.
    """
    shown = {point.name for point in results.shown}
    runs = [
        _logged(point, run, tuning=tuning)
        for point in results.points
        for tuning, finished in ((True, point.tuning), (False, point.runs))
        if tuning or point.name in shown
        for run in finished
        if run.path.name not in failures
    ]
    trainings = read_study(results.path).trainings
    points = {point.name: point for point in results.points}
    for name, reason in failures.items():
        point, seed = points[trainings[name]["arm"]], trainings[name]["seed"]
        tuning = seed in results.tuning_seeds
        runs.append(LoggedRun(**_identity(point), seed=seed, tuning=tuning, failure=reason))
    return runs


def _logged(point: SweepPoint, run: SweepRun, *, tuning: bool) -> LoggedRun:
    history = history_of(run.path)
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
