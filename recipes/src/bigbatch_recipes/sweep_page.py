"""The page and the files of a sweep: score against average batch, tables, curves of its runs."""

import csv
import io
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.log import html_report
from bigbatch.log.chart import Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.history import History, deviation, history_of, score_unit, scores_text
from bigbatch.log.row_schema import finite
from bigbatch.log.series_style import NEUTRAL
from bigbatch.log.web_page import html_table, note
from bigbatch_recipes.sweep_results import SweepPoint, SweepResults, value_text

_RUN_COLUMNS = ("average_batch", "steps", "skipped", "elapsed_seconds", "diverged")
_SIZES = {"wide": (900, 440), "narrow": (380, 400)}  # for windows of either kind
_STYLE = (
    ".wide { max-width: 1000px; } .narrow { max-width: 520px; display: none; }\n"
    "@media (max-width: 800px) { .wide { display: none; } .narrow { display: block; } }\n"
)


def write_sweep(sweep: SweepResults, folder: Path) -> None:
    """Writes sweep.svg, sweep.csv with one row per run, and report.html."""
    figure = svg([sweep_panel(sweep, _SIZES["wide"])], key=True, standalone=True)
    html_report.write_text(folder / "sweep.svg", figure)
    html_report.write_text(folder / "sweep.csv", as_csv(sweep))
    histories = [history_of(path) for path in sweep.drawn]
    sections, report = _sections(sweep, histories), folder / "report.html"
    html_report.write_page(report, sweep.name, sweep_summary(sweep), sections, _STYLE)


def as_csv(sweep: SweepResults) -> str:
    """One row per run, for sweep.csv; `difference` is that from the reference's run of its seed."""
    keys, scores, differences = sweep.keys, sweep.score_names, sweep.differences()
    arms = differences.arms if differences else {}
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["point", *keys, "seed", *scores, *_RUN_COLUMNS, "difference"])
    for point in sweep.points:
        values = [point.values.get(key, "") for key in keys]
        for run in point.runs:
            run_scores = [run.scores.get(score) for score in scores]
            numbers = [finite(getattr(run, name)) for name in _RUN_COLUMNS]
            difference = arms[point.name].by_seed.get(run.seed) if point.name in arms else None
            out.writerow([point.name, *values, run.seed, *run_scores, *numbers, difference])
    return text.getvalue()


def sweep_summary(sweep: SweepResults) -> str:
    """A sentence on the front of a sweep, from its best score to its largest average batch.

    It has the results of the paired test as the table of differences has them.
    """
    runs = [run for point in sweep.shown for run in point.runs]
    diverged = sum(run.diverged for run in runs)
    counts = f"; {diverged} of {len(runs)} runs diverged" * bool(diverged)
    if not sweep.front:
        return f"No point has finished all of its runs with a score{counts}"

    label, unit, _ = score_unit(sweep.score, [])
    differences = sweep.differences()

    def text(point: SweepPoint) -> str:
        score = scores_text(point.scores(sweep.score)) + unit * (", %" in sweep.score)
        end = f"{point.name}, {score} at an average batch of {point.average_batch:,.0f}"
        if differences is None or point.name not in differences.arms:
            return end
        result = differences.arms[point.name].result
        joined = {"not distinguished": " from", "above": "", "below": ""}.get(result, " against")
        return f"{end}, {result}{joined} {differences.reference}"

    first, last = sweep.front[0], sweep.front[-1]
    best = f"Best {label}: {text(first)}"
    if first is not last:
        best += f"; largest average batch on the front: {text(last)}"
    return best + counts


def sweep_panel(sweep: SweepResults, size: tuple[int, int]) -> Panel:
    """Score against average batch, with the Pareto front.

    Each combination of settings that are text or true/false has a colour and a marker.
    """
    groups: dict[str, list[SweepPoint]] = {}
    for point in sweep.measured:
        groups.setdefault(_group_name(point, sweep), []).append(point)
    front = Series(
        "front: best score for at least this batch",
        [point.average_batch for point in sweep.front],
        [fmean(point.scores(sweep.score)) for point in sweep.front],
        kind="step",
        style=NEUTRAL,
    )
    series = [
        _group(name, points, sweep, number) for number, (name, points) in enumerate(groups.items())
    ]
    x_label = "average batch, samples a step"
    return Panel(sweep.score, x_label, [front, *series], x_log=2, size=size)


def _group(name: str, points: list[SweepPoint], sweep: SweepResults, number: int) -> Series:
    """The points that share settings which are text; a line where one number alone varies."""
    numbers = [_numeric_values(point, sweep) for point in points]
    keys = dict.fromkeys(key for values in numbers for key in values)
    varied = [key for key in keys if len({values.get(key) for values in numbers}) > 1]
    scores = [point.scores(sweep.score) for point in points]
    means = [fmean(one) for one in scores]
    spreads = [deviation(one) for one in scores]
    return Series(
        name,
        [point.average_batch for point in points],
        means,
        low=[mean - spread for mean, spread in zip(means, spreads, strict=True)],
        high=[mean + spread for mean, spread in zip(means, spreads, strict=True)],
        kind="line" if len(varied) == 1 else "points",
        bars=True,
        markers=True,
        style=number,
        notes=[
            f"{point.name}: {scores_text(one)} at {point.average_batch:,.0f}"
            + ", diverged" * any(run.diverged for run in point.runs)
            for point, one in zip(points, scores, strict=True)
        ],
    )


def _group_name(point: SweepPoint, sweep: SweepResults) -> str:
    texts = [
        f"{key} {value_text(value)}"
        for key, value in point.values.items()
        if isinstance(value, str | bool) and key not in sweep.tuned
    ]
    return ", ".join(texts) or "every point"


def _numeric_values(point: SweepPoint, sweep: SweepResults) -> dict[str, Any]:
    return {
        key: value
        for key, value in point.values.items()
        if key not in sweep.tuned and not isinstance(value, str | bool)
    }


def _sections(sweep: SweepResults, histories: list[History]) -> Iterator[str]:
    edges = (f" {place}: the best value is at the edge of the grid." for place in sweep.at_edges)
    yield note(f"{sweep.title}.{''.join(edges)}")
    charts = {kind: sweep_panel(sweep, size) for kind, size in _SIZES.items()}
    for kind, chart in charts.items():
        caption = f"<figcaption>{escape(sweep.score)}</figcaption>"
        yield f'<figure class="{kind}">{caption}{svg([chart], key=True, titles=False)}</figure>'
    yield html_table(*sweep.table())
    yield from html_report.difference_section(sweep.differences())
    all_drawn = len(sweep.drawn) == len(sweep.begun)
    words = (
        "Every setting that was trained" if all_drawn else "Runs on the front; sweep.csv has all"
    )
    yield f"<h2>{words}</h2>"
    yield from html_report.table_sections(histories)
    yield from html_report.curve_sections(histories)
