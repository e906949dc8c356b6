"""Options that several commands have, and checks of combinations of options."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes import get_recipe
from bigbatch_recipes.process_group import is_rank_zero
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.settings import HELP, SECTIONS, SETTING_TYPES, Settings, Value

RecipeName = Annotated[str | None, typer.Argument(help="One of `bigbatch list` [digits].")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of all runs. May be repeated."),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="Runs of each arm or point [3, or the paper's].")
]
PaperScale = Annotated[bool, typer.Option("--paper-scale", help="Use the paper's settings.")]
Result = Annotated[str | None, typer.Option(help="With --paper-scale, one table or figure.")]
Data = Annotated[Path | None, typer.Option(help="Folder with data, or with data folders [data].")]
RunsDir = Annotated[Path | None, typer.Option(help="Folder for new directories [runs].")]
RunDir = Annotated[Path | None, typer.Option(help="Directory to write to; must be new or empty.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show results only.")]

_NOT_BY_SET = {
    "recipe": "it is the command's first argument",
    "arm": "give --arm, or --grid arm=... in a sweep",
    "seed": "give --seed, or --seeds",
    "data": "give --data",
}

Command = Callable[..., None]


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Adds an option for each of these settings to a command, which gets texts as keywords."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    str | None,
                    typer.Option(
                        help=HELP[name],
                        metavar=_metavar(SETTING_TYPES[name]),
                        rich_help_panel=SECTIONS[name],
                    ),
                ],
            )
            for name in names
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _metavar(kind: Any) -> str:
    """The placeholder of a value in the help, as typer writes its own."""
    kind = next((one for one in get_args(kind) if get_origin(one) is Annotated), kind)
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "<int>", float: "<float>", bool: "true|false"}.get(kind, "<str>")


def parse_settings(texts: dict[str, str | None]) -> dict[str, Value]:
    """The values of the settings that were given as options.

    Raises:
        SettingError: a text has another type than its setting.
    """
    return {
        name: Settings.parse_value(name, text) for name, text in texts.items() if text is not None
    }


def names_on_command_line(context: typer.Context) -> set[str]:
    """The names of the options and arguments that the command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name.rstrip("_")
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def format_options(names: Iterable[str], set_names: Iterable[str] = ()) -> str:
    """Options as the command line has them: --lr; --set lr for those among `set_names`."""
    return ", ".join(
        f"--set {name}" if name in set_names else f"--{name.replace('_', '-')}"
        for name in sorted(names)
    )


def refuse_options(
    reason: str, names: Iterable[str], set_names: Iterable[str] = (), alternative: str = ""
) -> None:
    """Raises SettingError where there are options that do not go together with another.

    Args:
        reason: the other option, or the choice that they do not go together with.
        names: names of the options to refuse.
        set_names: names among them that were given by --set.
        alternative: another remedy than to leave them out.
    """
    if options := format_options(names, set_names):
        raise SettingError(
            f"{reason} does not go together with {options}; leave them out{alternative}"
        )


def select_recipe(name: str | None, result: str | None, *, paper_scale: bool) -> Recipe:
    """The recipe of that name, digits by default; limited to one result of its paper if given.

    Raises:
        SettingError: there is no such recipe or result, or a result without the paper's scale.
    """
    recipe = get_recipe(name or "digits")
    if result is None:
        return recipe
    if not recipe.results:
        raise SettingError(f"recipe {recipe.name!r} has no --result {result}; leave it out")
    if not paper_scale:
        raise SettingError(f"--result {result} is of the paper's scale; give --paper-scale too")
    return recipe.for_result(result)


def apply_set_options(settings: Settings, texts: Sequence[str]) -> tuple[Settings, set[str]]:
    """The settings with each --set applied, and the names of the settings that it changed.

    Raises:
        SettingError: a text is not KEY=VALUE, or a key must be given by another option.
    """
    names: set[str] = set()
    for text in texts:
        change = settings.parse_change(text)
        for name in change.keys() & _NOT_BY_SET.keys():
            raise SettingError(f"--set cannot change {name!r}: {_NOT_BY_SET[name]}")
        settings, names = settings.with_changes(change), names | change.keys()
    return settings, names


def warn_of_arm_values(
    recipe: Recipe, names: Iterable[str], remedy: str, *, paper_scale: bool
) -> None:
    """Warns of arms whose own values take precedence over settings given for all arms."""
    arms = recipe.arms_at(paper_scale=paper_scale)
    for name in sorted(names):
        if own := [arm for arm, changes in arms.items() if name in changes]:
            warnings.warn(f"{', '.join(own)}: {name} stays the arm's own; {remedy}", stacklevel=2)


def find_data(recipe: Recipe, folder: Path | None) -> str:
    """The folder of a recipe's data, as its settings have it; a note says that data are synthetic.

    Raises:
        RunError: the data are not there.
        SettingError: the recipe reads no files.
    """
    if folder is not None and not folder.is_dir():
        raise RunError(f"there is no data folder {folder}; name one that exists")
    if folder is not None and not recipe.origin.files:
        raise SettingError(f"recipe {recipe.name!r} brings its own data; leave --data out")
    data_folder = recipe.origin.find(folder)
    if data_folder is None and recipe.origin.files and is_rank_zero():
        sys.stderr.write(f"bigbatch: note: no --data; {recipe.origin.otherwise} is used\n")
    return "" if data_folder is None else str(data_folder)
