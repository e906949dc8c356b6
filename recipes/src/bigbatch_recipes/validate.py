"""Checks of a recipe's settings, its network and its packages, before data are read."""

import torch
from torch import nn

from bigbatch.errors import BigbatchError, SettingError
from bigbatch.optional_packages import import_optional
from bigbatch_recipes.build_loop import OPTIMIZERS, build_controller
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.settings import Settings, require_choice

CAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # precisions of autocast


def build_on_meta_device(recipe: Recipe, settings: Settings) -> nn.Module:
    """The model on the meta device, or its outline."""
    with torch.device("meta"):
        return (recipe.outline or recipe.model)(settings)


def count_parameters(recipe: Recipe, settings: Settings) -> int:
    """Number of weights of the model; shared ones count once."""
    return sum(p.numel() for p in build_on_meta_device(recipe, settings).parameters())


def require_packages(recipe: Recipe) -> None:
    """Raises MissingPackageError if a package that the recipe's trainings need is missing."""
    for package in recipe.packages:
        import_optional(package, "bert", "bigbatch-recipes")


def require_trainable(recipe: Recipe, *settings_list: Settings) -> None:
    """Raises SettingError if the recipe cannot train with one of these settings on any data.

    Trainings, studies, sweeps and dry runs call it. It builds the policy, an example and the model,
    which check their own settings.
    """
    for settings in settings_list:
        build_controller(settings)
        require_choice("optimizer", settings.optimizer, OPTIMIZERS)
    different = {repr((s.task, s.precision)): s for s in settings_list}
    for settings in different.values():
        dtypes = {p.dtype for p in _build(recipe, settings).parameters()}
        if settings.precision in CAST and torch.float64 in dtypes:
            raise SettingError(
                f"precision={settings.precision} has no effect on a model in float64, which "
                "autocast leaves as it is; set the model to float32"
            )


def _build(recipe: Recipe, settings: Settings) -> nn.Module:
    """An example and the model on the meta device; errors of torch become SettingError."""
    try:
        recipe.example(settings, 1)
        return build_on_meta_device(recipe, settings)
    except BigbatchError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        values = ", ".join(f"{name}={value}" for name, value in settings.task.items())
        raise SettingError(
            f"recipe {recipe.name!r} cannot be built with {values}: {error}"
        ) from error
