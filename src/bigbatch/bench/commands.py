"""`bigbatch bench`: one command for each thing that is measured."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bigbatch.bench import measure, optimizers
from bigbatch.bench.timing import COLUMNS

app = typer.Typer(help="Measure what things cost on this machine, as ratios.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each ratio.")]


@app.command("measure")
def measure_(rounds: Rounds = 9) -> None:
    """What similarity, interval and second moment cost per step, by network and micro-batch."""
    table = Table(*COLUMNS, title=f"a step with / without; median of {rounds} interleaved rounds")
    for cost in track(measure.costs(rounds), "measuring", total=3 * len(measure.SHAPES)):
        table.add_row(*cost.row())
    Console().print(table)
    memory = Table("what", "peak MB", "gradient MB", title="memory of a fresh process")
    for what, megabytes, gradient in measure.peaks():
        memory.add_row(what, f"{megabytes:.0f}", f"{gradient:.0f}")
    Console().print(memory)


@app.command("optim")
def optim(rounds: Rounds = 30) -> None:
    """What a variance-reduced optimizer step costs."""
    table = Table(*COLUMNS, title=f"median of {rounds} interleaved rounds")
    for cost in optimizers.costs(rounds):
        table.add_row(*cost.row())
    Console().print(table)
