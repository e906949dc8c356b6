"""The report: one HTML file that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import yaml
from jinja2 import Environment

from bigbatch.errors import RunError
from bigbatch.runs.atomic_files import GENERATOR, write_atomically
from bigbatch.runs.curves import AXES, FIGURE_FORMATS, as_svg, curves, require_ending, write_figure
from bigbatch.runs.gsnr_heatmap import heat_maps
from bigbatch.runs.metrics import group_seeds, history_of, seeds_of, table_of
from bigbatch.runs.paired_differences import differences_of, require_reference
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.sweep_figure import sweep_figure
from bigbatch.runs.sweep_files import as_csv, as_json
from bigbatch.runs.sweep_results import SweepResults
from bigbatch.runs.time_to_score import ScoreTargets


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
    template = resources.files("bigbatch.runs").joinpath("html_report.html").read_text()
    first_seeds = [group[0] for group in group_seeds(histories).values()]
    page = Environment(autoescape=True).from_string(template)
    text = page.render(
        generator=GENERATOR,
        title=title,
        sweeps=[
            (sweep, as_svg(sweep_figure(sweep)), sweep.differences(against)) for sweep in sweeps
        ],
        table=table_of(all_histories),  # which counts runs without a step
        seeds=seeds_of(all_histories),
        differences=differences_of(all_histories, against),
        times=targets and (targets.title(all_histories), targets.table(all_histories)),
        figures={label: as_svg(curves(histories, x)) for x, label in AXES.items()},
        heat_maps=[as_svg(figure) for figure in map(heat_maps, first_seeds) if figure is not None],
        runs=[(run.name, yaml.safe_dump(run.settings, sort_keys=False)) for run in runs],
    )
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def write_sweep_files(sweep: SweepResults, folder: Path) -> None:
    """Writes sweep.png, sweep.json and sweep.csv; the CSV file has one row per run."""
    write_figure(sweep_figure(sweep), folder / "sweep.png")
    write_atomically(folder / "sweep.json", json.dumps(as_json(sweep), indent=1).encode())
    write_atomically(folder / "sweep.csv", as_csv(sweep).encode())
