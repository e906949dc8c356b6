"""The command line: train, sweep, compare, report, replay, recipes, bench.

Its help lists the commands without importing them: torch and what else one needs takes seconds.
"""

import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

_COMMANDS = {  # where each is, and the first line of its help
    "train": (
        "bigbatch.cli.train",
        "Trains a recipe: its whole study, or one training where a setting is given.",
    ),
    "sweep": (
        "bigbatch.cli.sweep",
        "Trains a recipe at every point of a grid, several trainings at a time.",
    ),
    "compare": ("bigbatch.cli.reports", "Shows runs and studies in one table."),
    "report": ("bigbatch.cli.reports", "Writes the report of runs and studies side by side."),
    "replay": (
        "bigbatch.cli.reports",
        "Shows what other policies would have chosen on a finished run's log, and at what cost.",
    ),
    "recipes": (
        "bigbatch.cli.recipes",
        "Lists what can be trained; of one, its arms, data and commands.",
    ),
    "bench": ("bigbatch.bench.commands", "Measure what things cost on this machine, as ratios."),
}


class _Late(TyperGroup):
    """Its help lists the commands; the one that is asked for is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, _imported(name) if name else listed, rest


def _imported(name: str) -> Any:
    command = getattr(import_module(_COMMANDS[name][0]), name)
    if not isinstance(command, typer.Typer):
        one = typer.Typer(rich_markup_mode="rich", add_completion=False)
        one.command()(command)
        command = one
    return get_command(command)


app = typer.Typer(
    cls=_Late,
    help="Train PyTorch models with a batch size that follows the gradient's noise.",
    epilog="Begin with: bigbatch train",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def main() -> None:
    """Runs the command; where none is named, shows them."""
    if sys.argv[1:2] not in ([], ["--help"]):
        from bigbatch.cli.run import run  # and torch with it

        run(app)
    elif os.environ.get("RANK", "0") == "0":
        app()
