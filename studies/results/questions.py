"""All questions of docs/results.md, by the names of their logs: how each is trained and drawn."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.log.curves import write_figure
from matplotlib.figure import Figure

from bigbatch.errors import RunError, SettingError
from bigbatch.log.atomic_files import write_atomically
from bigbatch_recipes import get_recipe
from bigbatch_recipes.console import LiveView
from studies.results import (
    any_start,
    batch_norm,
    batch_tables,
    estimate_accuracy,
    measured_batch,
    start_tables,
    variance_reduction,
    vr_tables,
)
from studies.results.comparison import Comparison
from studies.results.markdown import fill
from studies.results.run_log import RunLog, log_text, read_log

Train = Callable[[Path, Path | None, int | None, LiveView, float | None], str]


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        train: makes the text of its log; takes the folder of the runs, that of the data or None,
            the number of runs at a time or None, the view, and the value of `time.monotonic()` at
            which it stops or None. None where nothing is trained.
        tables: makes the tables of its log in a folder of logs.
        figure: draws its log in a folder of logs.
        log: path of the log from that folder; "" for its name with .json.
    """

    train: Train | None
    tables: Callable[[Path], str]
    figure: Callable[[Path], Figure]
    log: str = ""


def _of(
    comparison: Comparison, tables: Callable[[RunLog], str], figure: Callable[[RunLog], Figure]
) -> Question:
    file = f"{comparison.name}.json"

    def train(
        runs: Path, data: Path | None, jobs: int | None, view: LiveView, deadline: float | None
    ) -> str:
        folder = get_recipe(comparison.recipe).origin.find(data)
        return log_text(comparison.train(runs, str(folder or ""), jobs, view, deadline))

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
    def train(
        _: Path, data: Path | None, jobs: int | None, __: LiveView, deadline: float | None
    ) -> str:
        if deadline is not None:
            raise SettingError("estimates cannot be stopped and resumed; leave --minutes out")
        return json.dumps(estimate_accuracy.train(data, jobs or 1)) + "\n"

    def log(logs: Path) -> Any:
        return json.loads((logs / "estimates.json").read_bytes())

    return Question(
        train,
        lambda logs: estimate_accuracy.table(log(logs)),
        lambda logs: estimate_accuracy.figure(log(logs)),
    )


BATCHES = (*measured_batch.COMPARISONS, batch_norm.COMPARISON)
QUESTIONS: dict[str, Question] = {
    **{one.name: _of(one, batch_tables.tables, batch_tables.figure) for one in BATCHES},
    any_start.COMPARISON.name: _any_start(),
    variance_reduction.COMPARISON.name: _of(
        variance_reduction.COMPARISON, vr_tables.tables, vr_tables.figure
    ),
    "estimates": _estimates(),
}
TRAINED = {name: one.train for name, one in QUESTIONS.items() if one.train is not None}


_README_ARMS = ("fixed 64", "SimiGrad .2")  # in the figure of the README


def draw(logs: Path) -> list[Path]:
    """Draws the figure of every log into the folder of logs, and writes the tables into the pages.

    The pages are results.md in the folder above and those in the folder of the logs. Returns the
    files that were written.

    Raises:
        RunError: there is no log, one is damaged, or a place in a page has no table.
    """
    tables = tables_of(logs)
    pages = {page: fill(page.read_text(), tables) for page in pages_of(logs)}
    figures = {logs / f"{name}.png": QUESTIONS[name].figure(logs) for name in tables}
    if (first := measured_batch.COMPARISONS[0].name) in tables:
        log = read_log(logs / f"{first}.json")
        figures[logs / "score-over-steps.png"] = batch_tables.score_over_steps(log, _README_ARMS)
    for path, figure in figures.items():
        write_figure(figure, path)
    for page, text in pages.items():
        write_atomically(page, text.encode())
    return [*figures, *pages]


def tables_of(logs: Path) -> dict[str, str]:
    """The tables of every log, by the names of the questions.

    Raises:
        RunError: there is no log, or one is damaged.
    """
    logged = {name: logs / (one.log or f"{name}.json") for name, one in QUESTIONS.items()}
    names = [name for name, log in logged.items() if log.exists()]
    if not names:
        raise RunError(f"there is no log in {logs}; `bigbatch results train` writes one")
    return {name: QUESTIONS[name].tables(logs) for name in names}


def pages_of(logs: Path) -> list[Path]:
    """The pages that have the tables."""
    summary = logs.parent / "results.md"
    return [summary] * summary.exists() + sorted(logs.glob("*.md"))
