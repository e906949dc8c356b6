"""The commands by name.

`bigbatch --help` lists the commands without importing them, as importing torch takes seconds.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

_COMMANDS = {  # module, and first line of the help
    "advise": (
        "bigbatch.cli.advise_command",
        "Runs your training script as it is, and advises a batch size.",
    ),
    "train": (
        "bigbatch.cli.train_command",
        "Trains the study of a recipe, or one run where a setting is given.",
    ),
    "sweep": (
        "bigbatch.cli.sweep_command",
        "Trains a recipe at every point of a grid, several runs at a time.",
    ),
    "compare": ("bigbatch.cli.reports", "Shows runs and studies in one table."),
    "report": ("bigbatch.cli.reports", "Writes a report of runs and studies side by side."),
    "replay": (
        "bigbatch.cli.reports",
        "Replays the log of a run with other policies: their batch sizes and cost.",
    ),
    "recipes": (
        "bigbatch.cli.recipe_list",
        "Lists the recipes, or the arms, data and commands of one.",
    ),
    "bench": ("bigbatch.bench.commands", "Measures costs on this machine, as ratios."),
    "results": (
        "bigbatch.cli.results_command",
        "What the methods deliver: draws the results, or trains for them again.",
    ),
}


class _LazyGroup(TyperGroup):
    """Imports the command that is run, and no other."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, _import_command(name) if name else placeholder, rest


def _import_command(name: str) -> Any:
    command = getattr(import_module(_COMMANDS[name][0]), name)
    if not isinstance(command, typer.Typer):
        group = typer.Typer(rich_markup_mode=None, add_completion=False)
        group.command()(command)
        command = group
    return get_command(command)


app = typer.Typer(
    cls=_LazyGroup,
    help="Train PyTorch models with a batch size that follows the gradient's noise.",
    epilog="To start: bigbatch train",
    add_completion=False,
    rich_markup_mode=None,  # brackets are text, not style
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help, short_help=_help)(lambda: None)


def _print_version(*, requested: bool) -> None:
    if requested:
        typer.echo(f"bigbatch {import_module('bigbatch').__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
