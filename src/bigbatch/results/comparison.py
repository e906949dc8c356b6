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

from bigbatch.experiments import get_recipe
from bigbatch.experiments.process_pool import train_sweep
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.sweep import Point, start_sweep
from bigbatch.experiments.validate import require_trainable
from bigbatch.results.run_log import LoggedRun, RunLog, logged_runs
from bigbatch.results.step_cost import StepCost, measure_step_cost
from bigbatch.runs.atomic_files import write_atomically
from bigbatch.runs.console import LiveView
from bigbatch.runs.sweep_results import SweepResults, read_sweep_results

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

    def train(self, folder: Path, data: str, jobs: int | None, view: LiveView) -> RunLog:
        """Trains what is missing in `folder`, and collects it.

        Raises:
            RunError: data are missing, or a file in `folder` is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        recipe, settings = get_recipe(self.recipe), self.recipe_settings(data)
        cost = _step_cost(folder / "step_cost.json", lambda: measure_step_cost(recipe, settings))
        arms = self.arms(cost)
        runs = self._train_arms(folder / "arms", arms, settings, jobs, view)
        results = read_sweep_results(folder / "arms")
        assert results is not None
        if controls := self.controls(results):
            runs += self._train_arms(folder / "controls", controls, settings, jobs, view)
        return RunLog(self._about(arms), recipe.higher_is_better, cost, runs)

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
        tuned = {"lr": tuple(self.rates)}
        tuned |= {name: values for name, values in changes.items() if isinstance(values, tuple)}
        return [dict(zip(tuned, values, strict=True)) for values in product(*tuned.values())]

    def recipe_settings(self, data: str) -> Settings:
        """The settings that all arms change, with the data in this folder."""
        return get_recipe(self.recipe).settings().with_changes({**self.settings, "data": data})

    def _train_arms(
        self, path: Path, arms: Arms, settings: Settings, jobs: int | None, view: LiveView
    ) -> list[LoggedRun]:
        if not path.exists():
            points = self.points(arms, settings)
            names = dict.fromkeys(name for point in points for name in point.values)
            tuned = [name for name in names if name != "arm"] if self.tune_seeds else []
            start_sweep(get_recipe(self.recipe), path, points, tuned, self.seeds, self.tune_seeds)
        return logged_runs(path, train_sweep(path, jobs, view))

    def _about(self, arms: Arms) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "settings": dict(self.settings),
            "arms": {arm: dict(changes) for arm, changes in arms.items()},
            "rates": list(self.rates),
            "seeds": self.seeds,
            "tune_seeds": self.tune_seeds,
        }


def _step_cost(path: Path, measure: Callable[[], StepCost]) -> StepCost:
    """The step cost in the file; measured and written where there is none."""
    if not path.exists():
        write_atomically(path, json.dumps(asdict(measure())).encode())
    return StepCost(**json.loads(path.read_bytes()))
