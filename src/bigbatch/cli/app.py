"""The commands by name.

Their help lists the commands without importing them: torch and what else one needs takes seconds.
"""

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

_COMMANDS = {  # where each is, and the first line of its help
    "train": (
        "bigbatch.cli.train_command",
        "Trains a recipe: its whole study, or one training where a setting is given.",
    ),
    "sweep": (
        "bigbatch.cli.sweep_command",
        "Trains a recipe at every point of a grid, several trainings at a time.",
    ),
    "compare": ("bigbatch.cli.reports", "Shows runs and studies in one table."),
    "report": ("bigbatch.cli.reports", "Writes the report of runs and studies side by side."),
    "replay": (
        "bigbatch.cli.reports",
        "Shows what other policies would have chosen on a finished run's log, and at what cost.",
    ),
    "recipes": (
        "bigbatch.cli.recipe_list",
        "Lists what can be trained; of one, its arms, data and commands.",
    ),
    "bench": ("bigbatch.bench.commands", "Measures costs on this machine, as ratios."),
}


class _Late(TyperGroup):
    """Its help lists the commands; the one that is asked for is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, _imported(name) if name else listed, rest


def _imported(name: str) -> Any:
    command = getattr(import_module(_COMMANDS[name][0]), name)
    if not isinstance(command, typer.Typer):
        one = typer.Typer(rich_markup_mode=None, add_completion=False)
        one.command()(command)
        command = one
    return get_command(command)


app = typer.Typer(
    cls=_Late,
    help="Train PyTorch models with a batch size that follows the gradient's noise.",
    epilog="Begin with: bigbatch train",
    add_completion=False,
    rich_markup_mode=None,  # brackets are text, not style
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help, short_help=_help)(lambda: None)


def show() -> None:
    """The list of commands, or the version; on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        app()


def _say_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"bigbatch {import_module('bigbatch').__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show it, and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
