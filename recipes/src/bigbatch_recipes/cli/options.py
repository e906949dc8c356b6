"""Options that several commands have, and checks of combinations of options."""

import argparse
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from bigbatch.errors import RunError, SettingError
from bigbatch.log.atomic_files import expanded_path
from bigbatch.log.history import read_settings
from bigbatch_recipes.new_directory import require_free, reserve
from bigbatch_recipes.process_group import is_rank_zero, run_on_rank_zero
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.run_config import STUDY
from bigbatch_recipes.settings import HELP, SECTIONS, SETTING_TYPES, Settings
from bigbatch_recipes.torchrun import is_single_process

_OTHERWISE = ("recipe", "arm", "data", "task")  # settings that have other options
_NOT_BY_SET = {
    "recipe": "it is the command's first argument",
    "arm": "give --arm, or --grid arm=... in a sweep",
    "seed": "give --seed, or --seeds",
    "data": "give --data",
}


class CommandParser(argparse.ArgumentParser):
    """The options of a command; its errors are one line."""

    def __init__(self, name: str, description: str, examples: str) -> None:
        super().__init__(
            f"bigbatch {name}",
            usage=f"bigbatch {name} [RECIPE] [OPTIONS]",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )

    def given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The options and arguments that the command line has, by name."""
        return vars(self.parse_args(arguments))

    def error(self, message: str) -> NoReturn:
        """Raises SettingError."""
        raise SettingError(f"{message}; {self.prog} --help lists the options")

    def add_flag(self, option: str, text: str) -> None:
        """Adds an option without a value."""
        self.add_argument(option, action="store_true", help=text)

    def add_count(self, option: str, text: str, least: int = 1) -> None:
        """Adds an option whose value is a whole number of at least 1, or `least`."""

        def count(text: str) -> int:
            if not text.isdecimal() or int(text) < least:
                raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} on")
            return int(text)

        self.add_argument(option, metavar="<int>", type=count, help=text)

    def add_training(self, *without: str) -> None:
        """Adds what `train` and `sweep` share, with an option for each setting without another."""
        self.add_argument("recipe", nargs="?", help="one of `bigbatch list` [digits]")
        self.add_argument(
            "--set",
            action="append",
            metavar="KEY=VALUE",
            help="a setting of all runs; may be repeated",
        )
        self.add_count("--seeds", "runs of each arm or point [3, or the paper's]")
        self.add_flag("--paper-scale", "use the paper's settings")
        self.add_argument("--result", help="with --paper-scale, one table or figure")
        self.add_path("--data", "folder with data, or with data folders [data]")
        self.add_path("--runs-dir", "folder for new directories [runs]")
        self.add_path("--run-dir", "directory to write to; must be new or empty")
        self.add_flag("--quiet", "show results only")
        groups: dict[str, Any] = {}
        for name, kind in SETTING_TYPES.items():
            if name in (*_OTHERWISE, *without):
                continue
            section = SECTIONS[name]
            if section not in groups:
                groups[section] = self.add_argument_group(section)
            option = f"--{name.replace('_', '-')}"
            text = HELP[name].replace("%", "%%")
            groups[section].add_argument(option, metavar=_metavar(kind), help=text)

    def add_path(self, option: str, text: str) -> None:
        """Adds an option whose value is a path."""
        self.add_argument(option, type=expanded_path, metavar="PATH", help=text)


def _metavar(kind: Any) -> str:
    kind = next((one for one in get_args(kind) if get_origin(one) is Annotated), kind)
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "<int>", float: "<float>", bool: "true|false"}.get(kind, "<str>")


def format_options(names: Iterable[str]) -> str:
    """Options as the command line has them: --lr, --max-batch."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


def refuse_options(reason: str, names: Iterable[str]) -> None:
    """Raises SettingError where options were given that do not go together with another one."""
    if options := format_options(names):
        raise SettingError(f"{reason} does not go together with {options}; leave them out")


def select_recipe(given: Mapping[str, Any]) -> Recipe:
    """The recipe of that name, digits by default, at a scale; limited to one result if given.

    Raises:
        SettingError: there is no such recipe or result, or a result without the paper's scale.
    """
    recipe, result = get_recipe(given.get("recipe") or "digits"), given.get("result")
    recipe = recipe.at_scale(paper=given.get("paper_scale", False))
    if result is None:
        return recipe
    if not recipe.results:
        raise SettingError(f"recipe {recipe.name!r} has no --result {result}; leave it out")
    if not recipe.at_paper_scale:
        raise SettingError(f"--result {result} is of the paper's scale; give --paper-scale too")
    return recipe.for_result(result)


def select_settings(
    recipe: Recipe, given: Mapping[str, Any]
) -> tuple[Settings, set[str], set[str]]:
    """The recipe's settings, changed by the arm, then by --set, then by other options.

    Returns:
        The settings; names of those that have an option of their own which was given; names of all
        that were given.
    Raises:
        SettingError: a value of --set is not KEY=VALUE, or a key must be given by another option.
    """
    names = {name for name in given if name in SETTING_TYPES and name not in _OTHERWISE}
    changes = {name: Settings.parse_value(name, given[name]) for name in names}
    settings, set_names = recipe.settings(), set[str]()
    if "arm" in given:
        settings = recipe.arm(given["arm"], settings)
    for text in given.get("set", []):
        change = settings.parse_change(text)
        for name in change.keys() & _NOT_BY_SET.keys():
            raise SettingError(f"--set cannot change {name!r}: {_NOT_BY_SET[name]}")
        settings, set_names = settings.with_changes(change), set_names | change.keys()
    return settings.with_changes(changes), names, names | set_names


def require_new(given: Mapping[str, Any]) -> None:
    """Refuses --run-dir with --runs-dir, or where something is in it.

    Raises:
        RunError: something is in it, which no launch of several processes continues.
    """
    if "run_dir" in given:
        refuse_options("--run-dir", given.keys() & {"runs_dir"})
        if is_single_process():
            require_free(given["run_dir"])


def new_directory(given: Mapping[str, Any], name: str, launch: str | None = None) -> Path:
    """The directory of --run-dir, or one with a number in --runs-dir, which is reserved."""
    run_dir: Path | None = given.get("run_dir")
    return run_dir or reserve(given.get("runs_dir", Path("runs")), name, launch)


def warn_of_arm_values(recipe: Recipe, names: Iterable[str], remedy: str) -> None:
    """Warns of arms whose own values take precedence over settings given for all arms."""
    for name in sorted(names):
        if own := [arm for arm, changes in recipe.arm_tables.items() if name in changes]:
            warnings.warn(f"{', '.join(own)}: {name} stays the arm's own; {remedy}", stacklevel=2)


def require_resumable(path: Path) -> None:
    """Raises RunError where no run or study is at `path`."""

    def require() -> None:
        if not (path / STUDY).exists():
            read_settings(path)

    run_on_rank_zero(require)


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
