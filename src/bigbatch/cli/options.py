"""What several commands say of their options."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bigbatch.decide.named import POLICIES
from bigbatch.errors import RunError, SettingError
from bigbatch.recipes.ranks import leads
from bigbatch.recipes.recipe import Recipe

POLICY = f"NAME:KEY=VALUE,...; NAME one of: {', '.join(POLICIES)}."
SMOOTHING = "Samples to average noise over."
DEAD_BAND = "Hold smaller changes: 0.1 = 10 %."
WARM_UP = "Samples before the first change."


def given(**options: Any) -> dict[str, Any]:
    """Those that were."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_with(what: str, names: Iterable[str]) -> None:
    """Raises SettingError where options were given that do not go together with `what`."""
    listed = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
    if listed:
        raise SettingError(f"{what} does not go together with {listed}; leave them out")


def folder_of(recipe: Recipe, given: Path | None) -> str:
    """Where a recipe's data lie, as its settings have it; says so where it is made up.

    Raises:
        RunError: they are not there.
        SettingError: the recipe reads no files.
    """
    if given is not None and not given.is_dir():
        raise RunError(f"there is no data folder {given}; name one that exists")
    if given is not None and not recipe.origin.files:
        raise SettingError(f"recipe {recipe.name!r} brings its own data; leave --data out")
    found = recipe.origin.find(given)
    if found is None and recipe.origin.files and leads():
        sys.stderr.write(f"bigbatch: note: no --data; {recipe.origin.otherwise} is used\n")
    return "" if found is None else str(found)
