"""What several commands say of their options."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments import get_recipe
from bigbatch.experiments.process_group import is_rank_zero
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import HELP, SETTING_TYPES, Settings, Value
from bigbatch.policies.parse import POLICIES

POLICY = f"NAME:KEY=VALUE,...; NAME one of: {', '.join(POLICIES)}."

Full = Annotated[
    bool, typer.Option("--paper-scale", help="The paper's settings, not the small ones.")
]
Result = Annotated[
    str | None, typer.Option(help="With --paper-scale: one table or figure of the paper.")
]
Data = Annotated[
    Path | None, typer.Option(help="Folder with the data, or with folders of data [data].")
]
Runs = Annotated[Path | None, typer.Option(help="Where fresh directories go [runs].")]
Out = Annotated[Path | None, typer.Option(help="The directory itself; must be free.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show results only.")]

_NOT_SET = {
    "recipe": "it is the command's first argument",
    "arm": "--arm has what is of one, and --grid arm=... in a sweep",
    "seed": "give --seed, or --seeds",
    "data": "give --data",
}


Command = Callable[..., None]


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Gives a command an option for each of these settings; it takes their texts as keywords."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    str | None,
                    typer.Option(help=HELP.get(name, ""), metavar=_metavar(SETTING_TYPES[name])),
                ],
            )
            for name in names
        ]
        parameters = [*own, *options]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _metavar(kind: Any) -> str:
    """What a value looks like."""
    kind = next((one for one in get_args(kind) if get_origin(one) is Annotated), kind)
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "INTEGER", float: "NUMBER", bool: "true|false"}.get(kind, "TEXT")


def settings_of(texts: dict[str, str | None]) -> dict[str, Value]:
    """The values of the settings that were given as options.

    Raises:
        SettingError: a text has another type than its setting.
    """
    return {
        name: Settings.parse_value(name, text) for name, text in texts.items() if text is not None
    }


def typed_in(context: typer.Context) -> set[str]:
    """The names of the options and arguments that were typed."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {n.rstrip("_") for n, one in sources.items() if one and one.name == "COMMANDLINE"}


def as_typed(names: Iterable[str], by_set: Iterable[str] = ()) -> str:
    """Settings as the command line said them: --lr, or --set lr."""
    set_names = frozenset(by_set)
    return ", ".join(
        f"--set {name}" if name in set_names else f"--{name.replace('_', '-')}"
        for name in sorted(names)
    )


def refuse_with(what: str, names: Iterable[str], by_set: Iterable[str] = (), or_: str = "") -> None:
    """Raises SettingError where options were given that do not go together with `what`.

    Args:
        what: as it was typed, or whose value it is.
        names: of the options.
        by_set: those of them that --set said.
        or_: what else may be done about it.
    """
    if listed := as_typed(names, by_set):
        raise SettingError(f"{what} does not go together with {listed}; leave them out{or_}")


def recipe_of(name: str | None, result: str | None, *, paper_scale: bool) -> Recipe:
    """The recipe of that name, the digits without one; narrowed to one result of its paper.

    Raises:
        SettingError: there is no such recipe or result, or the result is not asked for in full.
    """
    recipe = get_recipe(name or "digits")
    if result is None:
        return recipe
    if not recipe.results:
        raise SettingError(f"recipe {recipe.name!r} has no --result {result}; leave it out")
    if not paper_scale:
        raise SettingError(f"--result {result} is of the paper's scale; give --paper-scale too")
    return recipe.for_result(result)


def set_by(settings: Settings, texts: Sequence[str]) -> tuple[Settings, set[str]]:
    """The settings as each --set changes them, and the names of those that it did.

    Raises:
        SettingError: no KEY=VALUE, or a key that has an option of its own to say it.
    """
    names: set[str] = set()
    for text in texts:
        change = settings.parse_change(text)
        for name in change.keys() & _NOT_SET.keys():
            raise SettingError(f"--set cannot say {name!r}: {_NOT_SET[name]}")
        settings, names = settings.with_changes(change), names | change.keys()
    return settings, names


def note_overruled(recipe: Recipe, names: Iterable[str], remedy: str, *, paper_scale: bool) -> None:
    """Says which arms have values of their own for what was given for all of them."""
    for name in sorted(names):
        own = [
            arm
            for arm, changes in recipe.arms_at(paper_scale=paper_scale).items()
            if name in changes
        ]
        if own:
            warnings.warn(f"{', '.join(own)}: {name} stays the arm's own; {remedy}", stacklevel=2)


def folder_of(recipe: Recipe, given: Path | None) -> str:
    """Where a recipe's data lie, as its settings have it; says so where it is made up.

    Raises:
        RunError: they are not there.
        SettingError: the recipe reads no files.
    """
    if given is not None and not given.is_dir():
        raise RunError(f"there is no data folder {given}; name one that exists")
    if given is not None and not recipe.origin.files:
        raise SettingError(f"recipe {recipe.name!r} brings its own data; leave --data out")
    found = recipe.origin.find(given)
    if found is None and recipe.origin.files and is_rank_zero():
        sys.stderr.write(f"bigbatch: note: no --data; {recipe.origin.otherwise} is used\n")
    return "" if found is None else str(found)
