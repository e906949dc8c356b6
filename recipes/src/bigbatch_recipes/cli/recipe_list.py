"""`bigbatch list`: the recipes, their data, size and duration."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bigbatch.errors import MissingPackageError, RunError
from bigbatch_recipes import EXPERIMENTS, RECIPES, get_recipe
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.datasets.location import DEFAULT_FOLDER, DatasetLocation
from bigbatch_recipes.recipe import Changes, Recipe, Result
from bigbatch_recipes.sweep import points_of
from bigbatch_recipes.validate import count_parameters

_COLUMNS = ("recipe", "paper", "data", "weights", "minutes")
_NO_WRAP = {"recipe", "weights", "minutes"}


def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to describe.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder in which to look for data [data].")
    ] = None,
) -> None:
    """Lists the recipes, or the arms, data and commands of one."""
    view = LiveView(plain_console())
    if name in EXPERIMENTS:
        view.print(f"{name}: {EXPERIMENTS[name].summary}")
        view.print(f"  bigbatch train {name}")
    elif name is not None:
        for line in _description(get_recipe(name), data):
            view.print(line)
    else:
        view.console.print(_table(data))
        for experiment in EXPERIMENTS.values():
            view.print(f"{experiment.name}: {experiment.summary}; one fixed experiment, no data")
        view.print("Weights: of the small scale, and of the paper. Minutes: one training at the")
        view.print("small scale on two cores. Arms, data and commands: bigbatch list NAME")


def _table(data: Path | None) -> Table:
    table = Table(*_COLUMNS, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header in _NO_WRAP
    for recipe in RECIPES.values():
        weights = "\n".join(_weight_counts(recipe))
        data_text = f"{recipe.origin.name}, {recipe.origin.size}: {_place(recipe.origin, data)}"
        table.add_row(recipe.name, recipe.paper, data_text, weights, f"{recipe.minutes:g}")
    return table


def _description(recipe: Recipe, data: Path | None) -> list[str]:
    origin = recipe.origin
    weights = _weight_counts(recipe)
    files = origin.needed if origin.files else "none"
    sweeps = []
    for sweep, scale in ((recipe.sweep, False), (recipe.paper_sweep, True)):
        settings = recipe.settings(paper_scale=scale)
        points = points_of(recipe, sweep, settings, paper_scale=scale) if sweep.grids else []
        sweeps.append(len(points))
    with_data = f"bigbatch train {recipe.name}" + (" --data DIR" if origin.files else "")
    return [
        f"{recipe.name}: {recipe.summary}",
        f"paper    {recipe.paper}",
        f"data     {origin.name}, {origin.size}",
        f"files    {files}",
        f"here     {_place(origin, data)}",
        f"weights  {weights[0]} at the small scale, {weights[1]} in the paper",
        f"minutes  {recipe.minutes:g}, one training at the small scale on two cores",
        f"sweep    {sweeps[0]:,} points at the small scale, {sweeps[1]:,} at the full one",
        "arms",
        *(f"  {arm}: {_changes(own)}" for arm, own in recipe.arms_at(paper_scale=False).items()),
        *(["results, each by --paper-scale --result"] if recipe.results else []),
        *(f"  {name}: {_result(one)}" for name, one in recipe.results.items()),
        "commands",
        f"  {with_data}",
        f"  {with_data} --arm {next(iter(recipe.arms))} --set epochs=1",
        f"  bigbatch train {recipe.name} --dry-run",
        f"  torchrun --nproc_per_node {recipe.paper_ranks} -m {with_data} --paper-scale",
    ]


def _changes(changes: Changes) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or "the recipe as it is"


def _result(result: Result) -> str:
    changes = _changes({name: value for name, (value, _) in result.settings.items()})
    return changes + f"; arms {', '.join(result.arms)}" * bool(result.arms)


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


def _weight_counts(recipe: Recipe) -> list[str]:
    """Numbers of weights at the small scale and at the paper's; "?" where a package is missing."""
    try:
        counts = [
            count_parameters(recipe, recipe.settings(paper_scale=one)) for one in (False, True)
        ]
    except MissingPackageError:
        return ["?", "?"]  # `bigbatch train` names the package
    return [_rounded(count) for count in counts]


def _rounded(count: int) -> str:
    """A number of weights with three digits."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return str(count)
