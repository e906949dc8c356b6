"""`bigbatch results`: trains the comparisons behind docs/results.md, and draws their results."""

from pathlib import Path
from typing import Annotated

import typer

from bigbatch.cli import options
from bigbatch.experiments import get_recipe
from bigbatch.experiments.settings import require_choice
from bigbatch.results.questions import COMPARISONS
from bigbatch.results.run_log import write_log
from bigbatch.runs.console import LiveView, plain_console

results = typer.Typer(
    help="What the methods deliver: draws the results, or trains them again.",
    add_completion=False,
    rich_markup_mode=None,
)

RunsDir = Annotated[Path, typer.Option(help="Folder of the runs, which are resumed if there.")]
Logs = Annotated[Path, typer.Option(help="Folder of the logs.")]


@results.callback()
def _group() -> None:
    """Makes `train` a command of the group while it is the only one."""


@results.command()
def train(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(COMPARISONS)}.")],
    data: options.Data = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time [cores / threads].")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    logs: Logs = Path("docs/results"),
    quiet: options.Quiet = False,
) -> None:
    """Trains a comparison and writes its log; an interrupted one is resumed."""
    require_choice("comparison", name, COMPARISONS)
    comparison = COMPARISONS[name]
    folder = options.find_data(get_recipe(comparison.recipe), data)
    view = LiveView(plain_console(), quiet=quiet)
    log = comparison.train(runs_dir / f"results-{name}", folder, jobs, view)
    logs.mkdir(parents=True, exist_ok=True)
    write_log(logs / f"{name}.json", log)
    view.print(f"log: {logs / f'{name}.json'}")
