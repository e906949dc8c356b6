"""A sweep: grids of settings become the trainings of a study."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bigbatch.errors import SettingError
from bigbatch.experiments.recipe import Grid, Recipe, Sweep
from bigbatch.experiments.settings import Settings, Value
from bigbatch.experiments.study import write_study
from bigbatch.experiments.validate import require_trainable, unused_in

_NEVER = {"recipe": "it is the command's first argument", "seed": "give --seeds instead"}
_NO_NAME = re.compile(r"[^A-Za-z0-9.+_]+")
_LONGEST = 40  # of a value in a file name, which may have 255 bytes


@dataclass(frozen=True)
class Point:
    """One combination of a sweep's values.

    Args:
        name: what varies, as a file name.
        values: what varies.
        settings: of a training there, of seed 0.
    """

    name: str
    values: Mapping[str, Value]
    settings: Settings


def sweep_of(
    recipe: Recipe,
    settings: Settings,
    texts: Sequence[str],
    tuned: Sequence[str],
    *,
    paper_scale: bool = False,
) -> Sweep:
    """The sweep that texts describe, their product; the recipe's own where there is none.

    Args:
        recipe: what is trained.
        settings: whose types the values are read in.
        texts: KEY=V1,V2,... each; where there is a |, values end there and may have commas.
        tuned: settings of which each point shows the best alone; none for those of the recipe.
        paper_scale: the recipe's own at the paper's scale.
    Raises:
        SettingError: an unknown key, one given twice, a value of another type, or no sweep at all.
    """
    own = recipe.paper_sweep if paper_scale else recipe.sweep
    if not texts:
        if not own.grids:
            raise SettingError(f"recipe {recipe.name!r} has no sweep of its own; give --grid")
        return Sweep(own.grids, tuple(tuned) or own.tuned)
    grid: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        key, _, listed = (part.strip() for part in text.partition("="))
        if key in grid:
            raise SettingError(f"--grid gives {key!r} twice; list all its values in one")
        parts = listed.split("|" if "|" in listed else ",")
        grid[key] = tuple(settings.parse_change(f"{key}={value}")[key] for value in parts)
    return Sweep((grid,), tuple(tuned))


def points_of(
    recipe: Recipe, sweep: Sweep, settings: Settings, *, paper_scale: bool = False
) -> list[Point]:
    """Every combination of each grid, once; without those whose min_batch exceeds their max_batch.

    An `arm` among the settings brings the arm's changes at this scale; the others come on top. What
    has no effect with others does not vary there: a fixed batch has no target.

    Raises:
        SettingError: a setting that cannot vary or work, or has no effect, or nothing is left.
    """
    found: list[tuple[dict[str, Value], Settings]] = []
    for grid in sweep.grids:
        _require_sweepable(grid)
        for combination in product(*grid.values()):
            asked = dict(zip(grid, combination, strict=True))
            unused = unused_in(_changed(recipe, settings, asked, paper_scale=paper_scale))
            values = {key: value for key, value in asked.items() if key not in unused}
            changed = _changed(recipe, settings, values, paper_scale=paper_scale)
            if changed.min_batch <= changed.max_batch and changed not in [one for _, one in found]:
                found.append((values, changed))
    if not found:
        raise SettingError("the sweep has no point; give values, with min_batch <= max_batch")
    used = {key for values, _ in found for key in values}
    if idle := sorted({key for grid in sweep.grids for key in grid} - used):
        raise SettingError(
            f"{', '.join(idle)} has no effect at any point of the grid; leave it out"
        )
    require_trainable(recipe, *(changed for _, changed in found))
    return _named(found, sweep)


def trainings_of(recipe: Recipe, points: Sequence[Point], seeds: int) -> dict[str, Settings]:
    """The trainings of the points over so many seeds, by the names of their directories.

    What needs another arm needs that one's point of the same values and seed.

    Raises:
        SettingError: the other arm is not in the sweep.
    """
    return {
        f"{point.name}-seed{seed}": point.settings.with_changes(
            {"arm": point.name, "seed": seed, **_before(recipe, point, points, seed)}
        )
        for seed in range(seeds)
        for point in points
    }


def start_sweep(
    recipe: Recipe, path: Path, points: Sequence[Point], tuned: Iterable[str], seeds: int
) -> None:
    """Writes down what the sweep at `path` will train, and how its results are to be shown.

    Raises:
        SettingError: an arm begins from one that is not in the sweep.
        RunError: something is at `path` already.
    """
    shown = {
        "tuned": list(tuned),
        "higher_is_better": recipe.higher_is_better,
        "points": {point.name: dict(point.values) for point in points},
    }
    write_study(path, trainings_of(recipe, points, seeds), sweep=shown)


def _require_sweepable(grid: Grid) -> None:
    for key, values in grid.items():
        if key in _NEVER:
            raise SettingError(f"{key!r} cannot vary within a sweep: {_NEVER[key]}")
        if not values:
            raise SettingError(f"the sweep gives {key!r} no value; list some")


def _changed(
    recipe: Recipe, settings: Settings, values: Mapping[str, Value], *, paper_scale: bool
) -> Settings:
    if "arm" in values:
        settings = recipe.arm(str(values["arm"]), settings, paper_scale=paper_scale)
    return settings.with_changes({key: value for key, value in values.items() if key != "arm"})


def _named(found: Sequence[tuple[dict[str, Value], Settings]], sweep: Sweep) -> list[Point]:
    """The points, named by what is not the same in all of them."""
    keys = dict.fromkeys(key for grid in sweep.grids for key in grid)
    if unknown := [key for key in sweep.tuned if key not in keys]:
        raise SettingError(f"tuned {', '.join(unknown)} must be in the grid: {', '.join(keys)}")
    varied = [key for key in keys if len({repr(one.get(key)) for one, _ in found}) > 1]
    points: list[Point] = []
    for one, changed in found:
        own = {key: one[key] for key in varied if key in one}
        name = ",".join(f"{key}={_file_name(value)}" for key, value in own.items()) or "all"
        taken = sum(point.name.partition("~")[0] == name for point in points)
        points.append(Point(f"{name}~{taken + 1}" if taken else name, own, changed))
    return points


def _file_name(value: Value) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return _NO_NAME.sub("-", text).strip("-")[:_LONGEST]


def _before(recipe: Recipe, point: Point, points: Sequence[Point], seed: int) -> dict[str, str]:
    """The directories, next to its own, of the runs that it needs, by the settings naming them."""
    return {
        name: f"{_needed(point, arm, points).name}-seed{seed}"
        for name, arm in point.settings.required_runs.items()
        if arm in recipe.arm_names
    }


def _needed(point: Point, arm: str, points: Sequence[Point]) -> Point:
    """The point of another arm whose values are otherwise this one's."""
    wanted = {**point.values, "arm": arm}
    for other in points:
        if other.values.get("arm") == arm and other.values.items() <= wanted.items():
            return other
    raise SettingError(
        f"arm {point.settings.arm!r} needs arm {arm!r} of the same values, which the sweep lacks; "
        f"put {arm} among its arms"
    )
