"""`bigbatch sweep`: trains the points of a grid over a recipe, several runs at a time."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Annotated, NoReturn

import typer

from bigbatch.errors import SettingError
from bigbatch_recipes.cli import options
from bigbatch_recipes.cli.dry_run_tables import NOT_TIMED, about_minutes
from bigbatch_recipes.cli.options import refuse_options
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.output_directory import reserve
from bigbatch_recipes.process_pool import default_jobs, train_sweep
from bigbatch_recipes.recipe import Recipe, Sweep
from bigbatch_recipes.settings import SETTING_TYPES
from bigbatch_recipes.study import report_study
from bigbatch_recipes.sweep import Point, points_of, start_sweep, sweep_of
from bigbatch_recipes.sweep_results import combinations_of
from bigbatch_recipes.torchrun import Launch, is_single_process

_GRID = "Values of a setting; separate values that have commas by |. Repeat it for a product."


@options.with_settings(
    *(one for one in SETTING_TYPES if one not in ("recipe", "arm", "seed", "data", "task"))
)
def sweep(
    context: typer.Context,
    recipe: options.RecipeName = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=V1,V2,...", help=_GRID)
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option("--tune", metavar="KEY", help="Show only the best value of this setting."),
    ] = None,
    seeds: options.Seeds = None,
    tune_seeds: Annotated[
        int, typer.Option(min=0, help="Seeds that tune alone, on --held-out samples.")
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time [cores / threads, or GPUs].")
    ] = None,
    paper_scale: options.PaperScale = False,
    result: options.Result = None,
    set_: options.Set = None,
    data: options.Data = None,
    runs_dir: options.RunsDir = None,
    run_dir: options.RunDir = None,
    resume: Annotated[Path | None, typer.Option(help="Directory of a sweep to resume.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the points and how long they take; train nothing."),
    ] = False,
    quiet: options.Quiet = False,
    **texts: str | None,
) -> None:
    """Trains a recipe at every point of a grid, several runs at a time.

    bigbatch sweep digits                        the recipe's own sweep
    bigbatch sweep digits --dry-run              its points and how long it takes
    bigbatch sweep --resume runs/digits-sweep-1  continues after an interruption
    bigbatch sweep digits --grid target=0.2,0.4,0.6 --grid lr=0.01,0.02 --tune lr
    bigbatch sweep ... --tune lr --tune-seeds 2 --held-out 300

    The last one tunes on other samples and seeds than those that are shown.
    """
    view = LiveView(plain_console(), quiet=quiet)
    if not is_single_process():
        raise SettingError("a sweep starts processes of its own; run it without torchrun")
    option_names = options.names_on_command_line(context)
    if resume is not None:
        refuse_options("--resume", option_names - {"resume", "jobs", "quiet"})
        _train(resume, jobs, context.obj, view)
        return
    if run_dir is not None:
        refuse_options("--run-dir", option_names & {"runs_dir"})
    chosen = options.select_recipe(recipe, result, paper_scale=paper_scale)
    seeds = seeds or chosen.seeds_at(paper_scale=paper_scale)
    settings = chosen.settings(paper_scale=paper_scale)
    settings, set_names = options.apply_set_options(settings, set_ or ())
    changes = options.parse_settings(texts)
    settings, names = settings.with_changes(changes), set_names | changes.keys()
    if not dry_run:  # which needs no data
        settings = settings.with_changes({"data": options.find_data(chosen, data)})
    grids = sweep_of(chosen, settings, grid or (), tune or (), paper_scale=paper_scale)
    if repeated := names & {key for one in grids.grids for key in one}:
        _refuse_repeated(options.format_options(repeated, set_names), own_grid=bool(grid))
    points = points_of(chosen, grids, settings, paper_scale=paper_scale)
    if any("arm" in one for one in grids.grids):
        options.warn_of_arm_values(chosen, names, "--grid changes it", paper_scale=paper_scale)
    if dry_run:
        trainings = _list_points(points, grids, seeds, tune_seeds, view)
        view.print(NOT_TIMED if paper_scale else _duration(chosen, points, trainings, jobs))
        return
    path = run_dir or reserve(runs_dir or Path("runs"), f"{chosen.name}-sweep")
    with context.obj.resumable(path, "sweep"):
        start_sweep(chosen, path, points, grids.tuned, seeds, tune_seeds)
    _train(path, jobs, context.obj, view)


def _refuse_repeated(names: str, *, own_grid: bool) -> NoReturn:
    owner = "--grid" if own_grid else "the sweep of the recipe"
    remedy = "leave one of them out" + ", or give a --grid of your own" * (not own_grid)
    raise SettingError(f"{owner} has values of {names} too; {remedy}")


def _list_points(
    points: Sequence[Point], sweep: Sweep, seeds: int, tune_seeds: int, view: LiveView
) -> int:
    """Prints the points, and how many trainings they are; returns that number."""
    for point in points:
        view.print(point.name)
    best = f", of which each shows the best {' and '.join(sweep.tuned)}" if sweep.tuned else ""
    shown = len(combinations_of(points, sweep.tuned)) if tune_seeds else len(points)
    tuning, trained = len(points) * tune_seeds, shown * seeds
    counts = f"{trained} trainings over {seeds} seeds each"
    if tune_seeds:
        counts = (
            f"{tuning} trainings tune over {tune_seeds} seeds each, and then {trained} train "
            f"{shown} points over {seeds} seeds each"
        )
    view.print(f"{len(points)} points{best}; {counts}")
    return tuning + trained


def _duration(recipe: Recipe, points: Sequence[Point], trainings: int, jobs: int | None) -> str:
    """How long the trainings take, each as long as the mean over the points."""
    each = fmean(recipe.minutes_of(point.settings) for point in points)
    most = default_jobs([point.settings.as_dict() for point in points])
    jobs = jobs or most
    rounds = ceil(trainings / min(jobs, most))  # more jobs than cores are no faster
    return (
        f"They take {about_minutes(each * rounds)} with --jobs {jobs}: a training "
        f"takes {about_minutes(each)}, measured on two cores."
    )


def _train(path: Path, jobs: int | None, launch: Launch, view: LiveView) -> None:
    """Trains the sweep and reports its results; exits with status 1 where a run failed."""
    with launch.resumable(path, "sweep"):
        failures = train_sweep(path, jobs, view)
    for name, reason in failures.items():
        view.print(f"{name} failed: {reason}")
    report_study(path, view)
    if failures:
        view.print(f"`bigbatch sweep --resume {path}` tries the {len(failures)} failed again")
        raise typer.Exit(1)
