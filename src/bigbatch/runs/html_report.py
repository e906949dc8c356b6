"""The report: one HTML file that opens without a network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import yaml
from jinja2 import Environment
from matplotlib.figure import Figure

from bigbatch.errors import RunError
from bigbatch.runs.atomic_files import MAKER, write_atomically
from bigbatch.runs.curves import AXES, FIGURE_FORMATS, as_svg, curves, require_ending, write_figure
from bigbatch.runs.gsnr_heatmap import heat_maps
from bigbatch.runs.metrics import History, group_seeds, history_of, seeds_of, table_of
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.sweep_figure import sweep_figure
from bigbatch.runs.sweep_results import SweepResults, as_csv, as_json


def write_report(
    runs: list[RunDirectory], out: Path, title: str, sweeps: Sequence[SweepResults] = ()
) -> None:
    """Writes the report of runs side by side.

    Args:
        runs: at least one.
        out: a `.html` page, or the curves alone as `.png` or `.svg`.
        title: its headline.
        sweeps: that the runs are of; each has a figure and a table on the page.
    Raises:
        SettingError: another ending.
        RunError: no run has a step yet, or the file cannot be written.
    """
    require_ending(out, (".html", *FIGURE_FORMATS))
    every = [history_of(run) for run in runs]
    histories = [history for history in every if history.rows]
    if not histories:
        raise RunError(f"{title}: no step is logged yet, so there is nothing to report")
    try:
        if out.suffix != ".html":
            write_figure(curves(histories, "samples"), out)
        else:
            table = table_of(every)  # those that have not begun are counted there
            template = resources.files("bigbatch.runs").joinpath("html_report.html").read_text()
            page = (
                Environment(autoescape=True)
                .from_string(template)
                .render(
                    maker=MAKER,
                    title=title,
                    sweeps=[(one, as_svg(sweep_figure(one))) for one in sweeps],
                    columns=table.columns,
                    seeds=seeds_of(every),
                    table=table.rows,
                    figures={label: as_svg(curves(histories, x)) for x, label in AXES.items()},
                    maps=[as_svg(drawn) for drawn in _heat_maps(histories)],
                    runs=[
                        (run.name, yaml.safe_dump(run.settings, sort_keys=False)) for run in runs
                    ],
                )
            )
            write_atomically(out, page.encode())
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None


def write_sweep_files(sweep: SweepResults, folder: Path) -> None:
    """Writes sweep.png, sweep.json and sweep.csv; the last has one row a run."""
    write_figure(sweep_figure(sweep), folder / "sweep.png")
    write_atomically(folder / "sweep.json", json.dumps(as_json(sweep), indent=1).encode())
    write_atomically(folder / "sweep.csv", as_csv(sweep).encode())


def _heat_maps(histories: list[History]) -> list[Figure]:
    """Of the first of each group of runs that differ in their seed only."""
    drawn = [heat_maps(runs[0]) for runs in group_seeds(histories).values()]
    return [figure for figure in drawn if figure is not None]
