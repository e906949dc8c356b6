"""All questions of docs/results.md, by the names of their logs: how each is trained and drawn."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bigbatch.experiments import get_recipe
from bigbatch.results import (
    any_start,
    batch_tables,
    estimate_accuracy,
    measured_batch,
    start_tables,
    variance_reduction,
    vr_tables,
)
from bigbatch.results.comparison import Comparison
from bigbatch.results.markdown import fill
from bigbatch.results.run_log import RunLog, log_text, read_log
from bigbatch.runs.atomic_files import write_atomically
from bigbatch.runs.console import LiveView
from bigbatch.runs.curves import write_figure


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        train: makes the text of its log; takes the folder of the runs, that of the data or None,
            the number of runs at a time or None, and the view.
        tables: makes the tables of its log in a folder of logs.
        figure: draws its log in a folder of logs.
    """

    train: Callable[[Path, Path | None, int | None, LiveView], str]
    tables: Callable[[Path], str]
    figure: Callable[[Path], Figure]


def _of(
    comparison: Comparison, tables: Callable[[RunLog], str], figure: Callable[[RunLog], Figure]
) -> Question:
    file = f"{comparison.name}.json"

    def train(runs: Path, data: Path | None, jobs: int | None, view: LiveView) -> str:
        folder = get_recipe(comparison.recipe).origin.find(data)
        return log_text(comparison.train(runs, str(folder or ""), jobs, view))

    return Question(
        train,
        lambda logs: tables(read_log(logs / file)),
        lambda logs: figure(read_log(logs / file)),
    )


def _any_start() -> Question:
    """Its target is that of the comparison of batches."""

    def target(logs: Path) -> float:
        return batch_tables.target_of(read_log(logs / f"{measured_batch.COMPARISONS[0].name}.json"))

    def log(logs: Path) -> RunLog:
        return read_log(logs / f"{any_start.COMPARISON.name}.json")

    return Question(
        _of(any_start.COMPARISON, str, lambda _: Figure()).train,
        lambda logs: start_tables.tables(log(logs), target(logs)),
        lambda logs: start_tables.figure(log(logs), target(logs)),
    )


def _estimates() -> Question:
    def train(_: Path, data: Path | None, jobs: int | None, __: LiveView) -> str:
        return json.dumps(estimate_accuracy.train(data, jobs or 1)) + "\n"

    def log(logs: Path) -> Any:
        return json.loads((logs / "estimates.json").read_bytes())

    return Question(
        train,
        lambda logs: estimate_accuracy.table(log(logs)),
        lambda logs: estimate_accuracy.figure(log(logs)),
    )


QUESTIONS: dict[str, Question] = {
    **{
        one.name: _of(one, batch_tables.tables, batch_tables.figure)
        for one in measured_batch.COMPARISONS
    },
    any_start.COMPARISON.name: _any_start(),
    variance_reduction.COMPARISON.name: _of(
        variance_reduction.COMPARISON, vr_tables.tables, vr_tables.figure
    ),
    "estimates": _estimates(),
}


def draw(logs: Path) -> list[Path]:
    """Draws the figure of every log next to it, and writes the tables into the pages.

    The pages are results.md in the folder above and those in the folder of the logs. Returns the
    files that were written.
    """
    tables: dict[str, str] = {}
    written: list[Path] = []
    for name, question in QUESTIONS.items():
        log = logs / f"{name}.json"
        if log.exists():
            tables[name] = question.tables(logs)
            written.append(log.with_suffix(".png"))
            write_figure(question.figure(logs), written[-1])
    for page in (logs.parent / "results.md", *sorted(logs.glob("*.md"))):
        if page.exists():
            write_atomically(page, fill(page.read_text(), tables).encode())
            written.append(page)
    return written
