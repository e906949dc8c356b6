"""`bigbatch bench`: one command for each thing that is measured."""

import os
from collections.abc import Iterable, Sequence
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import torch
import typer
from rich import box
from rich.progress import track
from rich.table import Table

from bigbatch.bench import (
    coverage,
    engine_cost,
    loop_cost,
    meter_cost,
    optimizer_cost,
    scaling,
    similarity_accuracy,
    step_kinds,
    trainer_cost,
    vr_vs_base,
)
from bigbatch.bench.timing import COLUMNS
from bigbatch.runs.console import plain_console
from bigbatch.runs.curves import FIGURE_FORMATS, require_writable

bench = typer.Typer(
    help="Measure what things cost on this machine, as ratios.",
    add_completion=False,
    rich_markup_mode=None,
)

Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each ratio.")]
Trials = Annotated[int, typer.Option(min=2, help="Steps drawn for each row.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Data = Annotated[
    Path | None,
    typer.Option(exists=True, help="Folder with fashion-mnist/, for gradients of a real network."),
]


@bench.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    """Where no command is named, all are shown."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


class _Row(Protocol):
    def row(self) -> tuple[str, ...]: ...


_R = TypeVar("_R", bound=_Row)
_WIDE = 200  # columns of a file


@bench.command("measure")
def measure_(
    rounds: Rounds = 7,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cpu",
) -> None:
    """What similarity, interval and second moment cost per step, by network and micro-batch."""
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"torch sees no GPU here, so --device {device} cannot be timed")
    title = f"a step with / without; median of {rounds} interleaved rounds"
    _show(title, COLUMNS, meter_cost.costs(rounds, device), total=4 * len(meter_cost.SHAPES))
    _show(
        "memory and bytes sent",
        meter_cost.RESOURCES,
        meter_cost.resources(),
        total=len(meter_cost.KINDS),
    )


@bench.command("optim")
def optim(
    rounds: Rounds = 7,
    over: Annotated[
        list[str] | None, typer.Option(help=f"Parameter lists: {', '.join(optimizer_cost.LISTS)}.")
    ] = None,
) -> None:
    """What optimizer steps cost, over the bytes that must move, memory's speed and their base."""
    for name in over or ():
        if name not in optimizer_cost.LISTS:
            raise typer.BadParameter(f"--over {name!r}: one of {', '.join(optimizer_cost.LISTS)}")
    title = (
        f"{optimizer_cost.implementation()}; median [least, most] of {rounds} interleaved rounds"
    )
    lists = over or list(optimizer_cost.LISTS)
    rows = (row for name in lists for row in optimizer_cost.step_costs(name, rounds))
    total = len(lists) * sum(len(team) for team in optimizer_cost.teams())
    _show(title, optimizer_cost.COLUMNS, rows, total=total)
    _show(title, optimizer_cost.MOMENT_COLUMNS, optimizer_cost.moment_costs(rounds), total=3)
    _show("median of 3 rounds", COLUMNS, [optimizer_cost.import_cost(rounds=3)])


@bench.command("loop")
def loop_(rounds: Rounds = 15) -> None:
    """What the adaptive loop costs over a plain one, in Python, in copies, in waiting samples."""
    _show(
        f"median of {rounds} interleaved rounds",
        loop_cost.COLUMNS,
        loop_cost.costs(rounds),
        total=loop_cost.ROWS,
    )


@bench.command("engines")
def engines_(
    rounds: Rounds = 5,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, max=4, help="Numbers of ranks: 2, 3, 4.")
    ] = None,
) -> None:
    """What ranks send under DDP, FSDP2 and DeepSpeed, counted and by formula, and its cost."""
    counts = ranks or engine_cost.RANKS
    total = sum(len(step_kinds.kinds(engine, n)) for n in counts for engine in step_kinds.ENGINES)
    title = f"gloo, ranks share {os.cpu_count()} cores; median [least, most] of {rounds} rounds"
    _show(title, engine_cost.COLUMNS, engine_cost.costs(rounds, counts), total=total)
    _show(scaling.TITLE, scaling.COLUMNS, scaling.run(), total=scaling.ROWS)
    title = f"one process; median [least, most] of {rounds} rounds"
    _show(title, trainer_cost.COLUMNS, trainer_cost.costs(rounds), total=trainer_cost.ROWS)


@bench.command("vr-vs-base")
def vr_vs_base_(seeds: Annotated[int, typer.Option(min=2, help="Trainings of each.")] = 3) -> None:
    """Variance-reduced optimizers and their bases on the digits, each at its best rate."""
    title = f"digits, batch 512, k = 8, 25 epochs; mean ± standard deviation over {seeds} seeds"
    _show(title, vr_vs_base.COLUMNS, vr_vs_base.run(seeds), total=3 * len(vr_vs_base.GRIDS) + 1)


@bench.command("coverage")
def coverage_(trials: Trials = coverage.TRIALS, seed: Seed = 0, data: Data = None) -> None:
    """How often intervals of several levels hold the truth, where the truth is known."""
    rows = coverage.run(seed, trials, data)
    _show(f"coverage of intervals, {trials} trials", coverage.COLUMNS, rows)


@bench.command("similarity-accuracy")
def similarity_accuracy_(
    trials: Trials = similarity_accuracy.TRIALS,
    seed: Seed = 0,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="A .png or .svg to draw. Replaces only what bigbatch wrote.")
    ] = None,
) -> None:
    """Our similarity and SimiGrad's own cosine of the same steps, against the truth."""
    if out is not None:
        require_writable(out, FIGURE_FORMATS)
    rows = _show(
        "two estimates", similarity_accuracy.COLUMNS, similarity_accuracy.run(seed, trials, data)
    )
    if out is not None:
        similarity_accuracy.figure(rows, out)


def _show(
    title: str, columns: Sequence[str], rows: Iterable[_R], total: int | None = None
) -> list[_R]:
    """Shows progress, then the table, as Markdown where nobody watches; returns the rows."""
    console = plain_console()
    table = Table(*columns)
    if not console.is_terminal:
        console = plain_console(width=_WIDE)
        table = Table(*columns, box=box.MARKDOWN)
    console.print(title)
    seen = []
    for row in track(rows, "measuring", total=total, console=plain_console(stderr=True)):
        table.add_row(*row.row())
        seen.append(row)
    console.print(table)
    return seen


for _command in bench.registered_commands:
    _command.short_help = getdoc(_command.callback)  # the list shows all of it
