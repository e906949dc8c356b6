"""The papers' experiments: one file each, with model, data and settings.

The recipes, and torch with them, are imported when the first of these names is used:
`bigbatch --help` uses none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigbatch_recipes.recipe_registry import EXPERIMENTS as EXPERIMENTS
    from bigbatch_recipes.recipe_registry import RECIPES as RECIPES
    from bigbatch_recipes.recipe_registry import get_recipe as get_recipe


def __getattr__(name: str) -> Any:
    if name in ("EXPERIMENTS", "RECIPES", "get_recipe"):
        return getattr(import_module("bigbatch_recipes.recipe_registry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
