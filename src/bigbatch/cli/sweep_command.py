"""`bigbatch sweep`: a grid over a recipe, trained side by side, and what it found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bigbatch.cli.options import (
    Data,
    Full,
    Out,
    Quiet,
    Result,
    Runs,
    as_typed,
    folder_of,
    note_overruled,
    recipe_of,
    refuse_with,
    set_by,
    settings_of,
    typed_in,
    with_settings,
)
from bigbatch.errors import RunError, SettingError
from bigbatch.experiments.process_pool import train_side_by_side
from bigbatch.experiments.settings import SETTING_TYPES
from bigbatch.experiments.study import report_study
from bigbatch.experiments.sweep import Point, points_of, start_sweep, sweep_of
from bigbatch.experiments.torchrun import Launch, is_single_process
from bigbatch.runs.atomic_files import reserve
from bigbatch.runs.console import LiveView, plain_console
from bigbatch.runs.run_config import read_sweep

_GRID = "A setting's values; | parts those with commas. Repeat it for a product."


@with_settings(
    *(one for one in SETTING_TYPES if one not in ("recipe", "arm", "seed", "data", "task"))
)
def sweep(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="One of `bigbatch recipes` [digits].")
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=V1,V2,...", help=_GRID)
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option("--tune", metavar="KEY", help="Show the best value of it alone."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings a point [3; with --paper-scale the paper's]."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Trainings at a time [cores / threads, or GPUs].")
    ] = None,
    paper_scale: Full = False,
    result: Result = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of all trainings."),
    ] = None,
    data: Data = None,
    runs_dir: Runs = None,
    run_dir: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this sweep.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trainings, and train nothing.")
    ] = False,
    quiet: Quiet = False,
    **texts: str | None,
) -> None:
    """Trains a recipe at every point of a grid, several trainings at a time.

    The recipe's own sweep: bigbatch sweep digits

    Another: bigbatch sweep digits --grid target=0.2,0.4,0.6 --grid lr=0.01,0.02 --tune lr

    What it would train: bigbatch sweep digits --dry-run

    After an interruption: bigbatch sweep --resume runs/digits-sweep-1
    """
    view = LiveView(plain_console(), quiet=quiet)
    if not is_single_process():
        raise SettingError("a sweep starts processes of its own; run it without torchrun")
    if resume is not None:
        refuse_with("--resume", typed_in(context) - {"resume", "jobs", "quiet"})
        if read_sweep(resume) is None:
            raise RunError(f"{resume} holds no sweep; name a directory that `bigbatch sweep` made")
        _train(resume, jobs, context.obj, view)
        return
    if run_dir is not None:
        refuse_with("--run-dir", typed_in(context) & {"runs_dir"})
    chosen = recipe_of(recipe, result, paper_scale=paper_scale)
    repeats = seeds or chosen.seeds_at(paper_scale=paper_scale)
    settings, set_names = set_by(chosen.settings(paper_scale=paper_scale), set_ or ())
    changes = settings_of(texts)
    settings, names = settings.with_changes(changes), set_names | changes.keys()
    if not dry_run:  # which needs no data
        settings = settings.with_changes({"data": folder_of(chosen, data)})
    grids = sweep_of(chosen, settings, grid or (), tune or (), paper_scale=paper_scale)
    if twice := names & {key for one in grids.grids for key in one}:
        whose = "--grid" if grid else "the sweep of the recipe"
        remedy = "leave one of them out" + ", or give a --grid of your own" * (not grid)
        raise SettingError(f"{whose} has values of {as_typed(twice, set_names)} too; {remedy}")
    points = points_of(chosen, grids, settings, paper_scale=paper_scale)
    if any("arm" in one for one in grids.grids):
        note_overruled(chosen, names, "--grid changes it", paper_scale=paper_scale)
    if dry_run:
        _list(points, grids.tuned, repeats, view)
        return
    place = run_dir or reserve(runs_dir or Path("runs"), f"{chosen.name}-sweep")
    with context.obj.resumable(place, "sweep"):
        start_sweep(chosen, place, points, grids.tuned, repeats)
    _train(place, jobs, context.obj, view)


def _list(points: Sequence[Point], tuned: Sequence[str], seeds: int, view: LiveView) -> None:
    for point in points:
        view.say(point.name)
    of_best = f", of which each shows the best {' and '.join(tuned)}" if tuned else ""
    view.say(
        f"{len(points)} points{of_best}; {len(points) * seeds} trainings over {seeds} seeds each"
    )


def _train(place: Path, jobs: int | None, launch: Launch, view: LiveView) -> None:
    """Trains, shows and writes what was found; exit status 1 where a run failed."""
    with launch.resumable(place, "sweep"):
        failed = train_side_by_side(place, jobs, view)
    for name, reason in failed.items():
        view.say(f"{name} failed: {reason}")
    report_study(place, view)
    if failed:
        view.say(f"`bigbatch sweep --resume {place}` tries the {len(failed)} failed again")
        raise typer.Exit(1)
