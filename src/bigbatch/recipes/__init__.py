"""One file a published experiment: what to train, on which data, with which numbers."""

from bigbatch.recipes.digits import DIGITS
from bigbatch.recipes.recipe import Recipe, require_choice

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (DIGITS,)}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        SettingError: there is none.
    """
    require_choice("recipe", name, RECIPES)
    return RECIPES[name]
