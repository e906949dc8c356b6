"""The report: one HTML file that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import GENERATOR, write_atomically
from bigbatch.log.curve_series import AXES, NOISE_POINTS, POINTS, Panel, panels_of
from bigbatch.log.curves import (
    FIGURE_FORMATS,
    as_svg,
    curves,
    key_texts,
    require_ending,
    write_figure,
)
from bigbatch.log.gsnr_heatmap import heat_maps
from bigbatch.log.line_styles import DARK, LIGHT, MARKERS, PAGES, short_names, style_of
from bigbatch.log.metrics import History, group_seeds, history_of, seeds_of, table_of
from bigbatch.log.paired_differences import differences_of, require_reference
from bigbatch.log.report_summary import summaries_of, sweep_summary
from bigbatch.log.run_directory import RunDirectory
from bigbatch.log.seed_summary import SeedSummary
from bigbatch.log.svg_panels import panel_svg, swatch_svg
from bigbatch.log.time_to_score import ScoreTargets
from bigbatch_recipes.sweep_chart import sweep_chart
from bigbatch_recipes.sweep_figure import sweep_figure
from bigbatch_recipes.sweep_files import as_csv, as_json
from bigbatch_recipes.sweep_results import SweepResults
from bigbatch_recipes.sweep_svg import SIZES, sweep_svg

_MOST_SUMMARIES = 8  # sentences that are shown at once
_HEAT_MAP_BYTES = 400_000  # after so many, no further map is drawn: the page stays small


def write_report(
    runs: list[RunDirectory],
    out: Path,
    title: str,
    sweeps: Sequence[SweepResults] = (),
    *,
    against: str | None = None,
    targets: ScoreTargets | None = None,
) -> None:
    """Writes a report of runs side by side.

    Args:
        runs: one run or more.
        out: a `.html` page, or the curves alone as `.png` or `.svg`.
        title: the title of the page.
        sweeps: the sweeps that the runs belong to; each has a figure and a table on the page.
        against: arm or point of a sweep from which to show differences; None for the first.
        targets: scores for which to show the time to reach them.
    Raises:
        SettingError: another ending, or no arm or point has the name `against`.
        RunError: no run has a step yet, or the file cannot be written.
    """
    require_ending(out, (".html", *FIGURE_FORMATS))
    all_histories = [history_of(run) for run in runs]
    histories = [history for history in all_histories if history.rows]
    if not histories:
        raise RunError(f"{title}: no step is logged yet, so there is nothing to report")
    groups = group_seeds(all_histories)
    points = {point.name: point for sweep in sweeps for point in sweep.points}
    require_reference(against, {**groups, **points})
    if out.suffix != ".html":
        write_figure(curves(histories, "samples"), out)
        return
    text = _render(
        "html_report.html",
        generator=GENERATOR,
        title=title,
        summaries=summaries_of(all_histories, against),
        most=0 if sweeps else _MOST_SUMMARIES,
        sweeps=[
            (sweep, sweep_summary(sweep), *_sweep_parts(sweep), sweep.differences(against))
            for sweep in sweeps
        ],
        table=table_of(all_histories),  # which counts runs without a step
        seeds=seeds_of(all_histories),
        differences=differences_of(all_histories, against),
        times=targets and (targets.title(all_histories), targets.table(all_histories)),
        **_curve_parts(histories),
        heat_maps=_heat_maps(histories),
        runs=[(run.name, yaml.safe_dump(run.settings, sort_keys=False)) for run in runs],
        style=_render(
            "html_report.css", light=LIGHT, dark=DARK, pages=PAGES, figures=AXES.values()
        ),
        script=_file("html_report.js"),
    )
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def _curve_parts(histories: list[History]) -> dict[str, Any]:
    """What the page says of curves, by the names in its template."""
    names = list(group_seeds(histories))
    labels = short_names(names)
    panels = {label: panels_of(histories, x) for x, label in AXES.items()}
    drawn: list[Panel] = [panel for of_axis in panels.values() for panel in of_axis]
    return {
        "figures": {
            label: [(panel.title, panel_svg(panel, labels)) for panel in of_axis]
            for label, of_axis in panels.items()
        },
        "arms": [
            {"name": text, "style": style_of(arm), "swatch": swatch_svg(style_of(arm))}
            for arm, text in enumerate(key_texts(names, labels))
        ],
        "center": SeedSummary.of(history.settings for history in histories).center_word,
        "points": POINTS,
        "noise_points": NOISE_POINTS,
        "has_intervals": any(curve.interval for panel in drawn for curve in panel.curves),
    }


def _heat_maps(histories: list[History]) -> list[str]:
    """Heat maps of the first seed of each setting, as many as the page has room for."""
    maps: list[str] = []
    for group in group_seeds(histories).values():
        if sum(map(len, maps)) > _HEAT_MAP_BYTES:
            break
        if (figure := heat_maps(group[0])) is not None:
            maps.append(as_svg(figure))
    return maps


def _sweep_parts(sweep: SweepResults) -> tuple[list[dict[str, Any]], str]:
    """The key of a sweep's figure, and the figure for wide and narrow windows."""
    chart = sweep_chart(sweep)
    keys = [
        {
            "name": group.name,
            "style": style_of(number),
            "swatch": swatch_svg(style_of(number), MARKERS[number % len(MARKERS)]),
        }
        for number, group in enumerate(chart.groups)
    ]
    return keys, "".join(sweep_svg(chart, kind) for kind in SIZES)


def _render(name: str, **values: Any) -> str:
    return Environment(autoescape=name.endswith(".html")).from_string(_file(name)).render(**values)


def _file(name: str) -> str:
    return resources.files("bigbatch.log").joinpath(name).read_text()


def write_sweep_files(sweep: SweepResults, folder: Path) -> None:
    """Writes sweep.png, sweep.json and sweep.csv; the CSV file has one row per run."""
    write_figure(sweep_figure(sweep), folder / "sweep.png")
    write_atomically(folder / "sweep.json", json.dumps(as_json(sweep), indent=1).encode())
    write_atomically(folder / "sweep.csv", as_csv(sweep).encode())
