"""`bigbatch results`: draws the tables and figures of docs/results.md, or trains for them again."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bigbatch.log.atomic_files import write_atomically
from bigbatch_recipes.cli import options
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.settings import require_choice
from studies.results.questions import TRAINED, draw

results = typer.Typer(
    help="Draws the results of docs/results.md, or trains for them again.",
    add_completion=False,
    rich_markup_mode=None,
)

Logs = Annotated[Path, typer.Option(help="Folder of the logs.")]
_LOGS = Path("docs/results")


@results.command("draw")
def draw_all(logs: Logs = _LOGS) -> None:
    """Draws all figures and tables from the logs; trains nothing."""
    for path in draw(logs):
        typer.echo(path)


@results.command()
def train(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(TRAINED)}.")],
    data: Annotated[Path | None, typer.Option(exists=True, help="Folder of data folders.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time [cores / threads].")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after so many, and write the log of what is finished."),
    ] = None,
    runs_dir: Annotated[
        Path, typer.Option(help="Folder of the runs, which are resumed if there.")
    ] = Path("runs"),
    logs: Logs = _LOGS,
    quiet: options.Quiet = False,
) -> None:
    """Trains for one question and writes its log; what was left is resumed."""
    require_choice("question", name, TRAINED)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    view = LiveView(plain_console(), quiet=quiet)
    text = TRAINED[name](runs_dir / f"results-{name}", data, jobs, view, deadline)
    logs.mkdir(parents=True, exist_ok=True)
    write_atomically(logs / f"{name}.json", text.encode())
    view.print(f"log: {logs / f'{name}.json'}")
