"""`bigbatch list`: the recipes, their data, size and duration."""

from pathlib import Path
from textwrap import fill

from bigbatch.errors import RunError
from bigbatch.log.text_table import terminal_width
from bigbatch_recipes.cli.options import CommandParser
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.datasets.files import DEFAULT_FOLDER, DatasetLocation
from bigbatch_recipes.recipe import Changes, Recipe
from bigbatch_recipes.recipe_registry import EXPERIMENTS, RECIPES, get_recipe
from bigbatch_recipes.sweep import points_of
from bigbatch_recipes.torchrun import Launch

_INDENT = " " * 13


def list_parser() -> CommandParser:
    """The options of `list`."""
    text = "Lists the recipes, or the arms, data and commands of one."
    parser = CommandParser("list", text, "  bigbatch list squad")
    parser.add_argument("recipe", nargs="?", help="recipe to describe")
    parser.add_path("--data", "folder in which to look for data [data]")
    return parser


def list_recipes(arguments: list[str], _: Launch) -> None:
    """Runs `bigbatch list`."""
    given, view = list_parser().given(arguments), LiveView()
    name, data = given.get("recipe"), given.get("data")
    if name in EXPERIMENTS:
        view.print(f"{name}: {EXPERIMENTS[name]}\n  bigbatch train {name}")
    elif name is not None:
        view.print("\n".join(_description(get_recipe(name), data)))
    else:
        for recipe in RECIPES.values():
            view.print(_lines(recipe, data))
        for name, summary in EXPERIMENTS.items():
            view.print(f"{name}: {summary}; one fixed experiment, no data")
        view.print("Arms, data and commands: bigbatch list NAME")


def _lines(recipe: Recipe, data: Path | None) -> str:
    width = terminal_width()
    lines = [fill(f"{recipe.name}: {recipe.summary}", width, subsequent_indent=_INDENT)]
    lines += [
        fill(text, width, initial_indent=f"    {name:9}", subsequent_indent=_INDENT)
        for name, text in _facts(recipe, data).items()
    ]
    return "\n".join([*lines, ""])


def _facts(recipe: Recipe, data: Path | None) -> dict[str, str]:
    small, paper = map(_rounded, recipe.parameters)
    return {
        "paper": recipe.paper,
        "data": f"{recipe.origin.name}, {recipe.origin.size}",
        "here": _place(recipe.origin, data),
        "weights": f"{small} at the small scale, {paper} in the paper",
        "minutes": f"{recipe.minutes:g}, one training at the small scale on two cores",
    }


def _description(recipe: Recipe, data: Path | None) -> list[str]:
    origin = recipe.origin
    sweeps = [
        len(points_of(one, one.sweep, one.settings())) if one.sweep.grids else 0
        for one in (recipe, recipe.at_scale(paper=True))
    ]
    with_data = f"bigbatch train {recipe.name}" + (" --data DIR" if origin.files else "")
    return [
        f"{recipe.name}: {recipe.summary}",
        *(f"{name:9}{text}" for name, text in _facts(recipe, data).items()),
        f"files    {origin.needed if origin.files else 'none'}",
        f"sweep    {sweeps[0]:,} points at the small scale, {sweeps[1]:,} at the full one",
        "arms",
        *(f"  {arm}: {_changes(own)}" for arm, own in recipe.arm_changes.items()),
        *(["results, each by --paper-scale --result"] if recipe.results else []),
        *(
            f"  {name}: {_changes({key: value for key, (value, _) in one.settings.items()})}"
            + f"; arms {', '.join(one.arms)}" * bool(one.arms)
            for name, one in recipe.results.items()
        ),
        "commands",
        f"  {with_data}",
        f"  {with_data} --arm {next(iter(recipe.arms))} --set epochs=1",
        f"  bigbatch train {recipe.name} --dry-run",
        f"  torchrun --nproc_per_node {recipe.paper_ranks} -m {with_data} --paper-scale",
    ]


def _changes(changes: Changes) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or "the recipe as it is"


def _place(origin: DatasetLocation, given: Path | None) -> str:
    """The place of the data, or what is used instead."""
    if not origin.files:
        return "always there"
    try:
        folder = origin.find(given)
    except RunError:
        return f"not in {given or DEFAULT_FOLDER}"
    if folder is None:
        return f"not in {DEFAULT_FOLDER}, {origin.otherwise} instead"
    return f"in {folder}"


def _rounded(count: int) -> str:
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return str(count)
