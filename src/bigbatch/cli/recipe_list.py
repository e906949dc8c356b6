"""`bigbatch recipes`: what can be trained, on which data, and how long it takes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bigbatch.errors import MissingPackageError, RunError
from bigbatch.experiments import EXPERIMENTS, RECIPES, get_recipe
from bigbatch.experiments.datasets.location import DEFAULT_FOLDER, DatasetLocation
from bigbatch.experiments.memory_estimate import count_parameters
from bigbatch.experiments.recipe import Changes, Recipe, Result
from bigbatch.experiments.sweep import points_of
from bigbatch.runs.console import LiveView, plain_console

_COLUMNS = ("recipe", "paper", "data", "weights", "minutes")
_NARROW = {"recipe", "weights", "minutes"}  # are never broken


def recipes(
    name: Annotated[str | None, typer.Argument(help="All about one of them.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with data, to be looked into [data].")
    ] = None,
) -> None:
    """Lists what can be trained; of one, its arms, data and commands."""
    view = LiveView(plain_console())
    if name in EXPERIMENTS:
        view.say(f"{name}: {EXPERIMENTS[name].summary}")
        view.say(f"  bigbatch train {name}")
    elif name is not None:
        for line in _all_about(get_recipe(name), data):
            view.say(line)
    else:
        view.console.print(_table(data))
        for experiment in EXPERIMENTS.values():
            view.say(f"{experiment.name}: {experiment.summary}; one fixed experiment, no data")
        view.say("Weights: of the small scale, and of the paper. Minutes: one training at the")
        view.say("small scale on two cores. Arms, data and commands: bigbatch recipes NAME")


def _table(data: Path | None) -> Table:
    table = Table(*_COLUMNS, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header in _NARROW
    for recipe in RECIPES.values():
        weights = "\n".join(
            _weights(recipe, paper_scale=paper_scale) for paper_scale in (False, True)
        )
        data_text = f"{recipe.origin.name}, {recipe.origin.size}: {_place(recipe.origin, data)}"
        row = (recipe.name, recipe.paper, data_text, weights, f"{recipe.minutes:g}")
        table.add_row(*row)
    return table


def _all_about(recipe: Recipe, data: Path | None) -> list[str]:
    origin = recipe.origin
    weights = [_weights(recipe, paper_scale=one) for one in (False, True)]
    files = origin.needed if origin.files else "none"
    sweeps = [
        len(points_of(recipe, sweep, settings, paper_scale=whole)) if sweep.grids else 0
        for sweep, settings, whole in (
            (recipe.sweep, recipe.settings(), False),
            (recipe.paper_sweep, recipe.settings(paper_scale=True), True),
        )
    ]
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
    """Where the data are, or what is used instead."""
    if not origin.files:
        return "always there"
    try:
        found = origin.find(given)
    except RunError:
        return f"not in {given or DEFAULT_FOLDER}"
    if found is None:
        return f"not in {DEFAULT_FOLDER}, {origin.otherwise} instead"
    return f"in {found}"


def _weights(recipe: Recipe, *, paper_scale: bool) -> str:
    """How many the model has, in the unit that fits."""
    try:
        amount, unit = float(count_parameters(recipe, recipe.settings(paper_scale=paper_scale))), ""
    except MissingPackageError:
        return "?"  # `bigbatch train` says which is missing
    for larger in (" K", " M", " B"):
        if amount >= 999.5:
            amount, unit = amount / 1000, larger
    return f"{amount:.3g}{unit}"
