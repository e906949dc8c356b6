"""What can be trained."""

from rich.console import Console

from bigbatch.recipes import EXPERIMENTS, RECIPES
from bigbatch.report.live import LiveView


def recipes() -> None:
    """Lists what can be trained."""
    view = LiveView(Console())
    for recipe in RECIPES.values():
        view.say(f"{recipe.name}  {recipe.summary}")
        view.say(f"  arms: {', '.join(recipe.arms)}")
    for experiment in EXPERIMENTS.values():
        view.say(f"{experiment.name}  {experiment.summary}")
