"""A comparison of arms: every arm at its own best learning rate, on fresh seeds.

Rates are tuned on held-out training samples and on seeds of their own, as `bigbatch sweep --tune lr
--tune-seeds` does it. Controls, which need runs of other arms, are trained after them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import write_atomically
from bigbatch_recipes import get_recipe
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.parallel_runs import train_sweep
from bigbatch_recipes.run_config import read_trainings
from bigbatch_recipes.settings import Settings
from bigbatch_recipes.study import settings_from
from bigbatch_recipes.sweep import Point, start_sweep, trainings_of
from bigbatch_recipes.sweep_results import SweepResults, read_sweep_results
from bigbatch_recipes.validate import require_trainable
from studies.results.run_log import LoggedRun, RunLog, logged_runs
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
        timed_sizes: batch sizes of the plain loop whose steps are timed.
    """

    name: str
    recipe: str
    settings: Mapping[str, Any]
    arms: Callable[[StepCost], Arms]
    rates: Sequence[float] = ()
    seeds: int
    tune_seeds: int = 0
    controls: Callable[[SweepResults], Arms] = lambda _: {}
    timed_sizes: Sequence[int] = (32, 128, 512)

    def train(
        self,
        folder: Path,
        data: str,
        jobs: int | None,
        view: LiveView,
        deadline: float | None = None,
    ) -> RunLog:
        """Trains what is missing in `folder`, and collects what is there at the end.

        All rates are tuned first; then each seed is trained for all arms before the next seed.
        Controls begin once no arm lacks a run.

        Args:
            folder: folder of the runs.
            data: folder of the data; "" for data that need none.
            jobs: runs at a time; None for one per GPU, or as many as the cores allow.
            view: shows the progress, and the runs that are missing.
            deadline: value of `time.monotonic()` at which the runs are stopped; None for none.
        Raises:
            RunError: data are missing, or a file in `folder` is damaged or of other trainings.
        """
        folder.mkdir(parents=True, exist_ok=True)
        recipe, settings = get_recipe(self.recipe), self.recipe_settings(data)
        cost = _step_cost(
            folder / "step_cost.json", lambda: measure_step_cost(recipe, settings, self.timed_sizes)
        )
        arms = self.arms(cost)

        def runs_of(name: str, arms: Arms) -> list[LoggedRun]:
            path = folder / name
            self._start(path, arms, settings)
            return logged_runs(path, train_sweep(path, jobs, view, deadline))

        log = RunLog(self._about(arms), recipe.higher_is_better, cost, runs_of("arms", arms))
        results = read_sweep_results(folder / "arms")
        assert results is not None
        if not log.missing and (controls := self.controls(results)):
            about = {**log.about, "controls": {arm: _tuned(of) for arm, of in controls.items()}}
            log = replace(log, about=about, runs=log.runs + runs_of("controls", controls))
        if log.missing:
            counts = ", ".join(f"{arm}: {count}" for arm, count in log.missing.items())
            view.print(f"missing runs, which the same command trains: {counts}")
        return log

    def points(self, arms: Arms, settings: Settings) -> list[Point]:
        """One point for each arm and combination of its tuned values.

        Raises:
            SettingError: a setting is unknown or invalid.
        """
        points = [
            Point(
                ",".join((arm, *(f"{name}={value:g}" for name, value in values.items()))),
                {"arm": arm, **values},
                settings.with_changes({**changes, **values}),
            )
            for arm, changes in arms.items()
            for values in self._combinations(changes)
        ]
        require_trainable(get_recipe(self.recipe), *(point.settings for point in points))
        return points

    def _combinations(self, changes: Mapping[str, Any]) -> list[dict[str, float]]:
        """All combinations of the tuned values of an arm."""
        tuned = {"lr": tuple(self.rates), **_tuned(changes)}
        return [dict(zip(tuned, values, strict=True)) for values in product(*tuned.values())]

    def recipe_settings(self, data: str) -> Settings:
        """The settings that all arms change, with the data in this folder."""
        return get_recipe(self.recipe).settings().with_changes({**self.settings, "data": data})

    def _start(self, path: Path, arms: Arms, settings: Settings) -> None:
        """Writes the trainings of these arms to `path`, or checks that they are there.

        Raises:
            RunError: others are there.
        """
        recipe, points = get_recipe(self.recipe), self.points(arms, settings)
        if path.exists():
            _require_trainings(path, trainings_of(recipe, points, self.seeds, self.tune_seeds))
            return
        names = dict.fromkeys(name for point in points for name in point.values)
        tuned = [name for name in names if name != "arm"] if self.tune_seeds else []
        start_sweep(recipe, path, points, tuned, self.seeds, self.tune_seeds)

    def _about(self, arms: Arms) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "settings": dict(self.settings),
            "arms": {arm: dict(changes) for arm, changes in arms.items()},
            "rates": list(self.rates),
            "seeds": self.seeds,
            "tune_seeds": self.tune_seeds,
        }


def _tuned(changes: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """The settings that an arm is tuned over, by its own values."""
    return {name: values for name, values in changes.items() if isinstance(values, tuple)}


def _require_trainings(path: Path, expected: Mapping[str, Settings]) -> None:
    """Raises RunError where the study at `path` has other trainings, as of older code."""
    file = path / "study.yaml"
    actual = {
        name: settings_from(f"{file}, training {name}", values)
        for name, values in read_trainings(path).items()
    }
    if actual != expected:
        raise RunError(f"{file} has other trainings than this comparison; move {path} away")


def _step_cost(path: Path, measure: Callable[[], StepCost]) -> StepCost:
    """The step cost in the file; measured and written where there is none.

    Raises:
        RunError: the file is damaged.
    """
    if not path.exists():
        write_atomically(path, json.dumps(asdict(measure())).encode())
        torch.cuda.empty_cache()  # the runs need a GPU's memory
    try:
        return StepCost(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is not the cost of a step ({error}); move it away") from None
