"""`bigbatch train linear-regression`: runs the study and leaves its directory.

report.html    tables and both figures on one page
figure1.png    training curves, weights, r
figure3.png    last loss against gamma and k
results.json   every number
"""

import json
import platform
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Shown

from bigbatch.experiments.linear_regression.arms import PASSES, DistributionFindings, study
from bigbatch.experiments.linear_regression.experiment import STEPS
from bigbatch.experiments.linear_regression.figures import figure1, figure3
from bigbatch.experiments.linear_regression.input_distributions import LAWS
from bigbatch.experiments.linear_regression.tables import Table, details_of, numbers_of, tables_of
from bigbatch.runs.atomic_files import made_whole, write_atomically
from bigbatch.runs.console import plain_console
from bigbatch.runs.curves import as_svg

_WIDE = 200  # columns of a file
_DPI = 90


def run(place: Path, seeds: int, quiet: bool) -> None:
    """Trains everything, writes the directory as a whole, and shows the tables.

    Args:
        place: the directory; must be free.
        seeds: runs of each arm.
        quiet: show no progress.
    Raises:
        RunError: something is at `place` already.
    """
    with made_whole(place) as folder:
        findings = _measured(seeds, quiet)
        write(findings, folder, place.name)
    console = plain_console()
    show(tables_of(findings), console)
    console.print(f"report: {place / 'report.html'}", soft_wrap=True)


def _measured(seeds: int, quiet: bool) -> list[DistributionFindings]:
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    findings = []
    with Progress(console=plain_console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("", total=PASSES * STEPS * len(LAWS))
        for law in LAWS:
            progress.update(task, description=f"inputs {law.name}".ljust(19))
            findings.append(study(law, seeds, advance=lambda: progress.advance(task)))
    return findings


def write(findings: Sequence[DistributionFindings], folder: Path, title: str) -> None:
    """Writes all files into `folder`."""
    figures = {"figure1": figure1(findings), "figure3": figure3(findings)}
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=_DPI)
    results = {"about": _about(), **numbers_of(findings)}
    text = json.dumps(results, allow_nan=False)
    write_atomically(folder / "results.json", text.encode())
    page = resources.files(__package__).joinpath("linear_regression.html").read_text()
    rendered = (
        Environment(autoescape=True)
        .from_string(page)
        .render(
            title=title,
            seeds=len(results["settings"]["seeds"]),
            tables=tables_of(findings),
            details=details_of(findings),
            figures={name: as_svg(figure) for name, figure in figures.items()},
            about=results["about"],
        )
    )
    write_atomically(folder / "report.html", rendered.encode())


def _about() -> dict[str, Any]:
    return {
        "bigbatch": metadata.version("bigbatch"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def show(tables: Sequence[Table], console: Console) -> None:
    """Prints the tables, as Markdown where nobody watches."""
    watched = console.is_terminal
    console = console if watched else plain_console(width=_WIDE)
    for table in tables:
        shown = Shown(
            *table.columns,
            title=table.title if watched else None,
            title_justify="left",
            box=box.SIMPLE_HEAD if watched else box.MARKDOWN,
        )
        for row in table.rows:
            shown.add_row(*row)
        if not watched:
            console.print(f"\n{table.title}\n")
        console.print(shown)
