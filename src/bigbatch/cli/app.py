"""The commands by name.

`bigbatch --help` lists the commands without importing them, as importing torch takes seconds.
"""

from importlib import import_module
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from bigbatch.cli.help_sections import SectionedCommand, SectionedGroup
from bigbatch.cli.loading_line import loading_line

_EXPERIMENTS = "The papers' experiments, and their runs"
_MEASUREMENTS = "What it costs and delivers"


class _Command(NamedTuple):
    """Where a command is, the heading that lists it, and the first line of its help."""

    place: str
    section: str
    help: str


COMMANDS = {
    "advise": _Command(
        "bigbatch.cli.advise_command:advise",
        "Your own training",
        "Runs your training script as it is, and advises a batch size.",
    ),
    "list": _Command(
        "bigbatch_recipes.cli.recipe_list:list_recipes",
        _EXPERIMENTS,
        "Lists the recipes, or the arms, data and commands of one.",
    ),
    "train": _Command(
        "bigbatch_recipes.cli.train_command:train",
        _EXPERIMENTS,
        "Trains the study of a recipe, or one run where a setting is given.",
    ),
    "sweep": _Command(
        "bigbatch_recipes.cli.sweep_command:sweep",
        _EXPERIMENTS,
        "Trains a recipe at every point of a grid, several runs at a time.",
    ),
    "compare": _Command(
        "bigbatch.cli.reports:compare", _EXPERIMENTS, "Shows runs and studies in one table."
    ),
    "report": _Command(
        "bigbatch.cli.reports:report",
        _EXPERIMENTS,
        "Writes a report of runs and studies side by side.",
    ),
    "replay": _Command(
        "bigbatch.cli.reports:replay",
        _EXPERIMENTS,
        "Shows batch sizes and cost of other policies in a run.",
    ),
}

_START = """Chooses the batch size of a PyTorch training from its gradient noise.

bigbatch advise train.py    advice for your own script: start with this
bigbatch train              a first study: handwritten digits, 3 seeds
bigbatch COMMAND --help     the options of a command
"""


class _LazyGroup(SectionedGroup):
    """Imports the command that is run, and no other."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, _import_command(name) if name else placeholder, rest


def _import_command(name: str) -> Any:
    with loading_line():
        command = resolve_name(COMMANDS[name].place)
    if not isinstance(command, typer.Typer):
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cls=SectionedCommand)(command)
        return get_command(single)
    command.info.cls = SectionedGroup
    for each in command.registered_commands:
        each.cls = SectionedCommand
    return get_command(command)


app = typer.Typer(
    cls=_LazyGroup,
    help=_START,
    context_settings={"max_content_width": 120},
    add_completion=False,
    rich_markup_mode=None,  # brackets are text, not style
    pretty_exceptions_enable=False,
)
for _name, _listed in COMMANDS.items():
    app.command(_name, help=_listed.help, rich_help_panel=_listed.section)(lambda: None)


def _print_version(*, requested: bool) -> None:
    if requested:
        typer.echo(f"bigbatch {import_module('bigbatch').__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...
