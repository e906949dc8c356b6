"""The points of a sweep: every combination of the values in grids of settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from bigbatch.errors import SettingError
from bigbatch_recipes.recipe import Grid, Recipe, Sweep
from bigbatch_recipes.settings import Settings, Value, policy_name, unused_in

_NOT_SWEEPABLE = {"recipe": "it is the command's first argument", "seed": "give --seeds instead"}
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.+_]+")
_MAX_LENGTH = 40  # of a value in a file name, which may have 255 bytes
_MAX_NAME = 230  # of a point's, before its seed


@dataclass(frozen=True)
class Point:
    """One arm of a study, or one combination of a sweep's values."""

    name: str  # the values as a file name
    values: Mapping[str, Value]  # values of the settings that vary
    settings: Settings  # settings of its training with seed 0


def sweep_of(
    recipe: Recipe, settings: Settings, texts: Sequence[str], tuned: Sequence[str]
) -> Sweep:
    """The product of the values in the texts; the recipe's own sweep without texts.

    Args:
        recipe: the recipe to train.
        settings: settings with the types of the values.
        texts: KEY=V1,V2,... each; a text with a | is split there, and its values may have commas.
        tuned: settings of which each point shows only the best; () for those of the recipe.
    Raises:
        SettingError: a key is unknown or repeated, a value has another type, or there is no sweep.
    """
    if not texts:
        if not recipe.sweep.grids:
            raise SettingError(f"recipe {recipe.name!r} has no sweep of its own; give --grid")
        return Sweep(recipe.sweep.grids, tuple(tuned) or recipe.sweep.tuned)
    grid: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        key, _, values = (part.strip() for part in text.partition("="))
        if key in grid:
            raise SettingError(f"--grid gives {key!r} twice; list all its values in one")
        separator = "|" if "|" in values else ","
        changes = (settings.parse_change(f"{key}={value}") for value in values.split(separator))
        grid[key] = tuple(change[key] for change in changes)
    return Sweep((grid,), tuple(tuned))


def points_of(recipe: Recipe, sweep: Sweep, settings: Settings) -> list[Point]:
    """Every combination of each grid, once; without those whose min_batch exceeds their max_batch.

    An `arm` changes the settings as in the recipe; other values override its changes. A setting
    does not vary where another makes it ineffective: a fixed batch has no target.

    Raises:
        SettingError: a setting cannot vary, is invalid or has no effect, or no point remains.
    """
    combinations: list[tuple[dict[str, Value], Settings]] = []
    for grid in sweep.grids:
        _require_sweepable(grid)
        for combination in product(*grid.values()):
            values = dict(zip(grid, combination, strict=True))
            unused = unused_in(_apply(recipe, settings, values))
            values = {key: value for key, value in values.items() if key not in unused}
            point = _apply(recipe, settings, values)
            is_new = all(point != other for _, other in combinations)
            if point.min_batch <= point.max_batch and is_new:
                combinations.append((values, point))
    if not combinations:
        raise SettingError("the sweep has no point; give values, with min_batch <= max_batch")
    used = {key for values, _ in combinations for key in values}
    if unused := {key for grid in sweep.grids for key in grid} - used:
        raise SettingError(
            f"{', '.join(sorted(unused))} has no effect at any point of the grid; leave it out"
        )
    return _name_points(combinations, sweep)


def _require_sweepable(grid: Grid) -> None:
    for key in grid.keys() & _NOT_SWEEPABLE.keys():
        raise SettingError(f"{key!r} cannot vary within a sweep: {_NOT_SWEEPABLE[key]}")


def _apply(recipe: Recipe, settings: Settings, values: Mapping[str, Value]) -> Settings:
    if "arm" in values:
        settings = recipe.arm(str(values["arm"]), settings)
    return settings.with_changes({key: value for key, value in values.items() if key != "arm"})


def _name_points(
    combinations: Sequence[tuple[dict[str, Value], Settings]], sweep: Sweep
) -> list[Point]:
    """The points, named by the values that differ between them."""
    keys = dict.fromkeys(key for grid in sweep.grids for key in grid)
    if unknown := [key for key in sweep.tuned if key not in keys]:
        raise SettingError(f"tuned {', '.join(unknown)} must be in the grid: {', '.join(keys)}")
    varied = [key for key in keys if len({repr(one.get(key)) for one, _ in combinations}) > 1]
    points: list[Point] = []
    for combination, settings in combinations:
        values = {key: combination[key] for key in varied if key in combination}
        name = ",".join(f"{key}={_file_name(key, value)}" for key, value in values.items()) or "all"
        name = name[:_MAX_NAME]
        equal = sum(point.name.partition("~")[0] == name for point in points)
        points.append(Point(f"{name}~{equal + 1}" if equal else name, values, settings))
    return points


def _file_name(key: str, value: Value) -> str:
    if key == "policy":
        value = policy_name(str(value))
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return _NOT_IN_NAMES.sub("-", text).strip("-")[:_MAX_LENGTH]
