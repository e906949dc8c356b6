"""`bigbatch compare`, `report` and `replay`, which read logs of runs."""

from pathlib import Path
from typing import Annotated

import typer

from bigbatch.errors import SettingError
from bigbatch.log.curves import FIGURE_FORMATS, require_writable
from bigbatch.log.history import (
    History,
    find_runs,
    group_seeds,
    history_of,
    measured_rows,
    seeds_of,
    table_of,
)
from bigbatch.log.html_report import write_report
from bigbatch.log.paired_differences import differences_of, require_reference
from bigbatch.log.replay import replay as replay_policies
from bigbatch.log.replay import save_figure, table_of_replay, time_in_words
from bigbatch.log.time_to_score import ScoreTargets
from bigbatch.policies.parse import POLICIES, parse_policy
from bigbatch_recipes.cli.options import parse_settings, refuse_options, with_settings
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.settings import CONTROLLER_SETTINGS
from bigbatch_recipes.sweep_results import read_sweep_results

Paths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs or studies.")]

Against = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="Arm from which to show the others' differences [the first]."),
]
To = Annotated[
    list[float] | None,
    typer.Option(
        "--to", metavar="SCORE", help="Show steps, samples, seconds to this score. May be repeated."
    ),
]

_REPLACES = "Replaces only what bigbatch wrote."


def compare(paths: Paths, against: Against = None, to: To = None) -> None:
    """Shows runs and studies in one table.

    bigbatch compare runs/digits-1 runs/digits-2
    bigbatch compare runs/digits-1 --against simigrad   differences from one arm
    bigbatch compare runs/digits-1 --to 85 --to 90      the time to these scores
    """
    targets = _targets(to)
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    require_reference(against, group_seeds(histories))
    times = targets and targets.table(histories)
    view = LiveView(plain_console())
    view.table(table_of(histories), seeds_of(histories))
    view.differences(differences_of(histories, against))
    if targets and times:
        view.table(times, targets.title(histories))


def _targets(scores: list[float] | None) -> ScoreTargets | None:
    return ScoreTargets(scores, _higher_is_better) if scores else None


def _higher_is_better(history: History) -> bool:
    return history.higher_is_better


def report(
    paths: Paths,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help=f"A .html page, or a .png or .svg figure. {_REPLACES}"),
    ] = None,
    against: Against = None,
    to: To = None,
) -> None:
    """Writes a report of runs and studies side by side.

    bigbatch report runs/digits-1                  into the study itself
    bigbatch report runs/digits-1 -o curves.png    the curves as a figure
    bigbatch report runs/digits-1 runs/digits-2 -o both.html
    """
    if out is None and len(paths) > 1:
        raise SettingError("several runs have no common place for their report; name it with -o")
    if out is None:
        out = paths[0] / "report.html"
    else:
        require_writable(out, (".html", *FIGURE_FORMATS))
    if out.suffix != ".html":
        of_tables = {"against": against, "to": to}
        refuse_options(f"-o {out}", (name for name, value in of_tables.items() if value))
    results = [(path, read_sweep_results(path)) for path in paths]
    runs: list[Path] = []
    for path, sweep in results:
        runs += [run.path for run in sweep.drawn] if sweep else find_runs(path)
    sweeps = [sweep for _, sweep in results if sweep is not None]
    title = " and ".join(path.resolve().name for path in paths)
    write_report(runs, out, title, sweeps, against=against, targets=_targets(to))
    LiveView(plain_console()).print(f"report: {out}")


@with_settings(*CONTROLLER_SETTINGS)
def replay(
    paths: Paths,
    policy: Annotated[
        list[str],
        typer.Option(metavar="NAME:KEY=VALUE,...", help=f"A policy: {', '.join(POLICIES)}."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help=f"A .png or .svg figure of batch sizes. {_REPLACES}"),
    ] = None,
    **texts: str | None,
) -> None:
    """Shows batch sizes and cost of other policies in a run.

    bigbatch replay runs/digits-1/simigrad-seed0 --policy simigrad:target=0.5
    bigbatch replay RUN --policy "schedule:32, x2 every 8K samples"

    Signal and noise are those of the log, whatever the batch size; see docs/policies.md.
    """
    options = parse_settings(texts)
    policies = {text: parse_policy(text) for text in policy}
    if out is not None:
        require_writable(out, FIGURE_FORMATS)
    view = LiveView(plain_console())
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    measured = [history for history in histories if measured_rows(history.rows)]
    for history in histories if measured else []:
        if history not in measured:
            view.print(f"{history.path.name}: nothing is measured yet; left out")
    replays = [replay_policies(history, policies, **options) for history in measured or histories]
    for one in replays:
        view.table(table_of_replay(one), f"{one.history.label}: {one.trace.samples:,} samples")
        view.print(time_in_words(one))
    if out is not None:
        save_figure(replays, out)
        view.print(f"figure: {out}")
