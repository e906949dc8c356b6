"""What this package adds to the command `bigbatch`, by entry points; it imports torch when called.

The first line of each docstring is listed by `bigbatch --help`.
"""

from importlib import import_module
from typing import Any

from bigbatch.interrupts import exit_on_interrupt, handle_interrupts


def list_recipes(arguments: list[str]) -> int:
    """Lists the recipes, or the arms, data and commands of one."""
    return _run("list", "recipe_list", "list_recipes", arguments)


def train(arguments: list[str]) -> int:
    """Trains the study of a recipe, or one run where a setting is given."""
    return _run("train", "train_command", "train", arguments)


def sweep(arguments: list[str]) -> int:
    """Trains a recipe at every point of a grid, several runs at a time."""
    return _run("sweep", "sweep_command", "sweep", arguments)


def _run(name: str, module: str, function: str, arguments: list[str]) -> int:
    with handle_interrupts(exit_on_interrupt):
        run: Any = import_module("bigbatch_recipes.torchrun").run
        command = getattr(import_module(f"bigbatch_recipes.cli.{module}"), function)
    status: int = run(name, command, arguments)
    return status
