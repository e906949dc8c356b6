"""`bigbatch sweep`: trains the points of a grid over a recipe, several runs at a time."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean

from bigbatch.errors import SettingError
from bigbatch_recipes.cli import options
from bigbatch_recipes.cli.options import CommandParser, refuse_options
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.recipe import Recipe, Sweep
from bigbatch_recipes.run_config import read_sweep
from bigbatch_recipes.sweep import Point, points_of, sweep_of
from bigbatch_recipes.sweep_results import SweepPoint, combinations_of
from bigbatch_recipes.torchrun import Launch, is_single_process

_EXAMPLES = """\
  bigbatch sweep digits                        the recipe's own sweep
  bigbatch sweep digits --dry-run              its points and how long it takes
  bigbatch sweep --resume runs/digits-sweep-1  continues after an interruption
  bigbatch sweep digits --grid target=0.2,0.4,0.6 --grid lr=0.01,0.02 --tune lr
  bigbatch sweep ... --tune lr --tune-seeds 2 --held-out 300
The last one tunes on other samples and seeds than those that are shown."""


def sweep_parser() -> CommandParser:
    """The options of `sweep`."""
    text = "Trains a recipe at every point of a grid, several runs at a time."
    parser = CommandParser("sweep", text, _EXAMPLES)
    parser.add_argument(
        "--grid",
        action="append",
        metavar="KEY=V1,V2,...",
        help="values of a setting; separate those that have commas by |; repeated for a product",
    )
    parser.add_argument(
        "--tune", action="append", metavar="KEY", help="show only the best value of this setting"
    )
    parser.add_count("--tune-seeds", "seeds that tune alone, on --held-out samples [0]", least=0)
    parser.add_count("--jobs", "runs at a time [cores / threads, or GPUs]")
    parser.add_path("--resume", "directory of a sweep to resume")
    parser.add_flag("--dry-run", "list the points and how long they take; train nothing")
    parser.add_training("seed")
    return parser


def sweep(arguments: list[str], launch: Launch) -> int:
    """Runs `bigbatch sweep`; returns 1 where a run failed."""
    given = sweep_parser().given(arguments)
    view, jobs = LiveView(quiet=given.pop("quiet", False)), given.get("jobs")
    is_dry = given.pop("dry_run", False)
    if not is_single_process():
        raise SettingError("a sweep starts processes of its own; run it without torchrun")
    if "resume" in given:
        refuse_options("--resume", given.keys() - {"resume", "jobs"})
        read_sweep(given["resume"])
        if not is_dry:
            return _train(given["resume"], jobs, launch, view)
        from bigbatch_recipes.dry_run import show_resumption

        show_resumption(given["resume"], view)
        return 0
    options.require_new(given)
    recipe = options.select_recipe(given)
    seeds = given.get("seeds") or recipe.seeds
    settings, _, names = options.select_settings(recipe, given)
    if "data" in given or not is_dry:
        settings = settings.with_changes({"data": options.find_data(recipe, given.get("data"))})
    grid, tune_seeds = given.get("grid", []), given.get("tune_seeds", 0)
    grids = sweep_of(recipe, settings, grid, given.get("tune", []))
    if repeated := names & {key for one in grids.grids for key in one}:
        owner = "--grid" if grid else "the sweep of the recipe"
        remedy = "leave one of them out" + ", or give a --grid of your own" * (not grid)
        raise SettingError(f"{owner} has values of {', '.join(sorted(repeated))} too; {remedy}")
    points = points_of(recipe, grids, settings)
    if any("arm" in one for one in grids.grids):
        options.warn_of_arm_values(recipe, names, "--grid changes it")
    if is_dry:
        from bigbatch_recipes.dry_run import NOT_TIMED
        from bigbatch_recipes.validate import require_trainable

        require_trainable(recipe, *(point.settings for point in points))
        trainings = _list_points(points, grids, seeds, tune_seeds, view)
        view.print(
            NOT_TIMED if recipe.at_paper_scale else _duration(recipe, points, trainings, jobs)
        )
        return 0
    from bigbatch_recipes.study import start_sweep

    path = options.new_directory(given, f"{recipe.name}-sweep")
    with launch.resumable(path, "sweep"):
        start_sweep(recipe, path, points, grids.tuned, seeds, tune_seeds)
    return _train(path, jobs, launch, view)


def _list_points(
    points: Sequence[Point], sweep: Sweep, seeds: int, tune_seeds: int, view: LiveView
) -> int:
    for point in points:
        view.print(point.name)
    best = f", of which each shows the best {' and '.join(sweep.tuned)}" if sweep.tuned else ""
    by_values = [SweepPoint(point.name, point.values) for point in points]
    shown = len(combinations_of(by_values, sweep.tuned)) if tune_seeds else len(points)
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
    from bigbatch_recipes.dry_run import about_minutes
    from bigbatch_recipes.parallel_runs import default_jobs

    each = fmean(recipe.minutes_of(point.settings) for point in points)
    most = default_jobs([point.settings.as_dict() for point in points])
    jobs = jobs or most
    rounds = ceil(trainings / min(jobs, most))  # more jobs than cores are no faster
    return (
        f"They take {about_minutes(each * rounds)} with --jobs {jobs}: a training "
        f"takes {about_minutes(each)}, measured on two cores."
    )


def _train(path: Path, jobs: int | None, launch: Launch, view: LiveView) -> int:
    """Trains the sweep and reports its results; returns 1 where a run failed."""
    from bigbatch_recipes.parallel_runs import train_sweep
    from bigbatch_recipes.study import report_study

    with launch.resumable(path, "sweep"):
        failures = train_sweep(path, jobs, view)
    for name, reason in failures.items():
        view.print(f"{name} failed: {reason}")
    report_study(path, view)
    if failures:
        view.print(f"`bigbatch sweep --resume {path}` tries the {len(failures)} failed again")
    return bool(failures)
