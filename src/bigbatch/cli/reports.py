"""What is shown of runs that there are: compare, report, replay."""

from pathlib import Path
from typing import Annotated

import typer

from bigbatch.cli.options import POLICY, settings_of, with_settings
from bigbatch.errors import SettingError
from bigbatch.experiments.settings import CONTROLLER_SETTINGS
from bigbatch.policies.parse import policy_named
from bigbatch.runs.console import LiveView, plain_console
from bigbatch.runs.curves import FIGURE_FORMATS, require_writable
from bigbatch.runs.html_report import write_report
from bigbatch.runs.metrics import history_of, seeds_of, table_of
from bigbatch.runs.replay import replay as replayed
from bigbatch.runs.replay import save_figure, table_of_replay, time_in_words
from bigbatch.runs.run_directory import find_runs
from bigbatch.runs.sweep_results import read_swept

Paths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs or studies.")]

_OURS = "Replaces only what bigbatch wrote."


def compare(paths: Paths) -> None:
    """Shows runs and studies in one table.

    Two studies: bigbatch compare runs/digits-1 runs/digits-2
    """
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    LiveView(plain_console()).table(table_of(histories), seeds_of(histories))


def report(
    paths: Paths,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help=f"A .html page, or a .png or .svg figure. {_OURS}"),
    ] = None,
) -> None:
    """Writes the report of runs and studies side by side.

    Into the study itself: bigbatch report runs/digits-1

    Two studies side by side: bigbatch report runs/digits-1 runs/digits-2 -o both.html

    The curves as a figure: bigbatch report runs/digits-1 -o curves.png
    """
    if out is None and len(paths) > 1:
        raise SettingError("several runs have no common place for their report; name it with -o")
    place = paths[0] / "report.html" if out is None else out
    if out is not None:
        require_writable(out, (".html", *FIGURE_FORMATS))
    swept = [(path, read_swept(path)) for path in paths]
    runs = [run for path, sweep in swept for run in (sweep.drawn if sweep else find_runs(path))]
    sweeps = [sweep for _, sweep in swept if sweep is not None]
    write_report(runs, place, " and ".join(path.resolve().name for path in paths), sweeps)
    LiveView(plain_console()).say(f"report: {place}")


@with_settings(*CONTROLLER_SETTINGS)
def replay(
    paths: Paths,
    policy: Annotated[list[str], typer.Option(help=POLICY)],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help=f"A .png or .svg of all batch sizes. {_OURS}")
    ] = None,
    **texts: str | None,
) -> None:
    """Shows what other policies would have chosen on a finished run's log, and at what cost.

    Two of them: bigbatch replay runs/digits-1/simigrad-seed0 --policy simigrad:target=0.5
    --policy "schedule:32, x2 every 8K samples" --smoothing "2K samples"

    The log's signal and noise are taken as they are: docs/policies.md says what that leaves out.
    """
    options = settings_of(texts)
    policies = {text: policy_named(text) for text in policy}
    if out is not None:
        require_writable(out, FIGURE_FORMATS)
    view = LiveView(plain_console())
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    measured = [history for history in histories if history.measured]
    for history in histories:
        if measured and not history.measured:
            view.say(f"{history.path.name}: nothing is measured yet; left out")
    found = [replayed(history, policies, **options) for history in measured or histories]
    for one in found:
        view.console.print(table_of_replay(one))
        view.say(time_in_words(one))
    if out is not None:
        save_figure(found, out)
        view.say(f"figure: {out}")
