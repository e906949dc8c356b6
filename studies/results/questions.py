"""All questions of docs/results.md, by the names of their logs: how each is trained and drawn."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.chart import Panel
from bigbatch.log.chart_svg import svg
from studies.results import any_start, variance_reduction, vr_tables
from studies.results.batch_comparisons import COMPARISONS
from studies.results.batch_tables import figure, score_over_steps, tables, target_of
from studies.results.comparison import Comparison
from studies.results.comparison_log import ComparisonLog, read_log

Charts = Sequence[Panel]

_BEGIN = "<!-- results:"
_PLACE = re.compile(rf"({_BEGIN} (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OVER_STEPS = ("fixed 64", "SimiGrad .2")  # in the figure of the README


@dataclass(frozen=True)
class Question:
    """One question: its trainings, and its tables and figures from a folder of logs."""

    comparison: Comparison
    tables: Callable[[Path], str]
    figures: Callable[[Path], Mapping[str, Charts]]  # by the names of their files


def _batches(comparison: Comparison) -> Question:
    name = comparison.name

    def figures(logs: Path) -> Mapping[str, Charts]:
        log = read_log(logs / f"{name}.json")
        charts = {name: figure(log)}
        if comparison is COMPARISONS[0]:
            charts["score-over-steps"] = score_over_steps(log, _OVER_STEPS)
        return charts

    return Question(comparison, lambda logs: tables(read_log(logs / f"{name}.json")), figures)


def _any_start() -> Question:
    """Its target is that of the first comparison of batches."""

    def with_target(logs: Path) -> tuple[ComparisonLog, float]:
        target = target_of(read_log(logs / f"{COMPARISONS[0].name}.json"))
        return read_log(logs / "any-start.json"), target

    return Question(
        any_start.COMPARISON,
        lambda logs: any_start.tables(*with_target(logs)),
        lambda logs: {"any-start": any_start.figure(*with_target(logs))},
    )


def _variance_reduction() -> Question:
    comparison = variance_reduction.COMPARISON
    file = f"{comparison.name}.json"
    return Question(
        comparison,
        lambda logs: vr_tables.tables(read_log(logs / file)),
        lambda logs: {comparison.name: vr_tables.figure(read_log(logs / file))},
    )


QUESTIONS: dict[str, Question] = {
    **{one.name: _batches(one) for one in COMPARISONS},
    any_start.COMPARISON.name: _any_start(),
    variance_reduction.COMPARISON.name: _variance_reduction(),
}


def draw(logs: Path) -> list[Path]:
    """Draws the figures of every log into the folder of logs, and writes tables into the pages.

    The pages are results.md in the folder above and those in the folder of the logs. Returns the
    files that were written.

    Raises:
        RunError: there is no log, one is damaged, or a place in a page has no table.
    """
    found = tables_of(logs)
    written = {page: fill(page.read_text(), found) for page in pages_of(logs)}
    for name in found:
        for file, charts in QUESTIONS[name].figures(logs).items():
            columns = 2 if len(charts) > 1 else 1
            text = svg(charts, columns=columns, key=True, standalone=True)
            written[logs / f"{file}.svg"] = text
    for path, text in written.items():
        write_atomically(path, text.encode())
    return list(written)


def tables_of(logs: Path) -> dict[str, str]:
    """The tables of every log, by the names of the questions.

    Raises:
        RunError: there is no log, or one is damaged.
    """
    names = [name for name in QUESTIONS if (logs / f"{name}.json").exists()]
    if not names:
        raise RunError(f"there is no log in {logs}; `python -m studies.results train` writes one")
    return {name: QUESTIONS[name].tables(logs) for name in names}


def pages_of(logs: Path) -> list[Path]:
    """The pages that have the tables."""
    summary = logs.parent / "results.md"
    return [summary] * summary.exists() + sorted(logs.glob("*.md"))


def fill(page: str, tables: Mapping[str, str]) -> str:
    r"""A page with the tables at their places, between `<!-- results: NAME -->` and `<!-- end -->`.

    Raises:
        RunError: a place has no table, or no end.
    Example:
        >>> fill("<!-- results: a -->\nold\n<!-- end -->", {"a": "new"})
        '<!-- results: a -->\nnew\n<!-- end -->'
    """
    if len(_PLACE.findall(page)) != page.count(_BEGIN):
        raise RunError(f"write each place as `{_BEGIN} NAME -->` and `<!-- end -->`, a line each")
    if unknown := {match["name"] for match in _PLACE.finditer(page)} - tables.keys():
        raise RunError(f"there is no log for {', '.join(sorted(unknown))}; train it, or drop it")
    return _PLACE.sub(lambda match: f"{match[1]}{tables[match['name']]}\n{match[3]}", page)
