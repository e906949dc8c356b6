"""A study: the arms of a recipe over several seeds, one training after another.

All ranks call the same functions; rank 0 reads, writes and shows.
"""

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError, SettingError
from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.history import find_runs, history_of, seeds_of, table_of
from bigbatch.log.html_report import write_report
from bigbatch.log.paired_differences import differences_of
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.new_directory import LAUNCH, create_directory_atomically
from bigbatch_recipes.process_group import is_rank_zero, run_on_rank_zero
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.run_config import STUDY, read_study, study_json
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import Settings, Value
from bigbatch_recipes.sweep import Point
from bigbatch_recipes.sweep_page import write_sweep
from bigbatch_recipes.sweep_results import read_sweep_results
from bigbatch_recipes.train_run import Training, train_run
from bigbatch_recipes.validate import require_packages, require_trainable

FIRST_TUNING_SEED = 1000  # seeds that tune are not those that are shown


def start_study(
    recipe: Recipe, path: Path, settings: Settings, seeds: int, launch: str | None = None
) -> None:
    """Writes the trainings of a study to `path`, and the launch of torchrun that began it."""
    points = [Point(arm, {"arm": arm}, recipe.arm(arm, settings)) for arm in recipe.arm_tables]
    require_packages(recipe)
    require_trainable(recipe, *(point.settings for point in points))
    write_study(path, trainings_of(recipe, points, seeds), launch)


def trainings_of(
    recipe: Recipe, points: Sequence[Point], seeds: int, tune_seeds: int = 0
) -> dict[str, Settings]:
    """The trainings of the points over so many seeds, by the names of their directories.

    An arm that needs another arm's run needs that arm's point of the same values and seed; in the
    path of a run that it needs from elsewhere, `{seed}` is replaced with its own seed. Of
    trainings whose settings hold samples out to tune on, those with seeds that are shown hold none
    out.
    """
    own: dict[int, dict[str, Value]] = {seed: {} for seed in tuning_seeds(tune_seeds)}
    own |= {seed: {"held_out": 0} if tune_seeds else {} for seed in range(seeds)}
    return {
        f"{point.name}-seed{seed}": point.settings.with_changes(
            {
                "arm": point.name,
                "seed": seed,
                **_required_runs(recipe, point, points, seed),
                **changes,
            }
        )
        for seed, changes in own.items()
        for point in points
    }


def tuning_seeds(count: int) -> list[int]:
    """The seeds of trainings that only tune."""
    return list(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + count))


def _required_runs(
    recipe: Recipe, point: Point, points: Sequence[Point], seed: int
) -> dict[str, str]:
    return {
        name: f"{_point_of_arm(run, point, points).name}-seed{seed}"
        if run in recipe.arm_names
        else run.replace("{seed}", str(seed))
        for name, run in point.settings.required_runs.items()
    }


def _point_of_arm(arm: str, point: Point, points: Sequence[Point]) -> Point:
    """The point of another arm with otherwise the same values."""
    values = {**point.values, "arm": arm}
    for other in points:
        if other.values.get("arm") == arm and other.values.items() <= values.items():
            return other
    raise SettingError(
        f"arm {point.settings.arm!r} needs arm {arm!r} of the same values, which the sweep lacks; "
        f"put {arm} among its arms"
    )


def write_study(
    path: Path,
    trainings: dict[str, Settings],
    launch: str | None = None,
    sweep: dict[str, Any] | None = None,
) -> None:
    """Writes the trainings of a study by the names of their directories."""
    for settings in trainings.values():
        for run in settings.required_runs.values():
            if run not in trainings:
                RunDirectory.open(path / run)
    content = study_json({name: one.as_dict() for name, one in trainings.items()}, sweep)
    with create_directory_atomically(path) as folder:
        write_atomically(folder / STUDY, content)
        if launch:
            write_atomically(folder / LAUNCH, launch.encode())


def start_sweep(
    recipe: Recipe,
    path: Path,
    points: Sequence[Point],
    tuned: Iterable[str],
    seeds: int,
    tune_seeds: int = 0,
) -> None:
    """Writes the trainings of a sweep to `path`, and how to show its results.

    Args:
        recipe: the recipe to train.
        path: the directory to create.
        points: the points of the grids.
        tuned: settings of which each point shows only the best value.
        seeds: trainings of each point that is shown.
        tune_seeds: trainings of each point that choose the best values by held-out samples; 0 to
            choose by the scores that are shown.
    Raises:
        SettingError: a point cannot be trained, an arm needs one that is not in the sweep, there
            is nothing to tune, or no sample is held out.
        RunError: something is at `path` already.
    """
    require_packages(recipe)
    require_trainable(recipe, *(point.settings for point in points))
    tuned = list(tuned)
    if tune_seeds and not tuned:
        raise SettingError("tune-seeds has no effect without --tune; name settings to tune")
    if tune_seeds and not all(point.settings.held_out for point in points):
        raise SettingError(
            "tune-seeds needs held_out: how many training samples to choose by; give --held-out"
        )
    if seeds > FIRST_TUNING_SEED:
        raise SettingError(f"seeds={seeds} must be at most {FIRST_TUNING_SEED}")
    description = {
        "tuned": tuned,
        "tuning_seeds": tuning_seeds(tune_seeds),
        "higher_is_better": recipe.higher_is_better,
        "points": {point.name: dict(point.values) for point in points},
    }
    write_study(path, trainings_of(recipe, points, seeds, tune_seeds), sweep=description)


def train_study(path: Path, view: LiveView) -> None:
    """Trains the unfinished runs, then shows the table and writes the report."""
    trainings = run_on_rank_zero(lambda: read_study(path).trainings)
    for number, (name, settings) in enumerate(trainings.items(), start=1):
        train_directory(path / name, settings, view, f"{number}/{len(trainings)} {name}")
    if is_rank_zero():
        report_study(path, view)


def report_study(path: Path, view: LiveView) -> None:
    """Writes and shows the results of the study at `path`; of a sweep a figure and tables too."""
    report = path / "report.html"
    if read_study(path).sweep is None:
        write_report([history_of(run) for run in find_runs(path)], report, path.name)
        _show_runs(path, view)
        return
    sweep = read_sweep_results(path)
    if not sweep.begun:
        view.print(f"{path.name}: no run has logged a step, so there is nothing to report")
    else:
        write_sweep(sweep, path)
        view.table(sweep.table(), f"{path.name}: {sweep.title}")
        for place in sweep.at_edges:
            view.print(f"{place}: the best value is at the edge of the grid; widen it")
        view.differences(sweep.differences())
        view.print(f"figure: {path / 'sweep.svg'}\nreport: {report}")


def _show_runs(path: Path, view: LiveView) -> None:
    histories = [history_of(run) for run in find_runs(path)]
    view.table(table_of(histories), f"{path.name}: {seeds_of(histories)}")
    view.differences(differences_of(histories))
    view.print(f"report: {path / 'report.html'}")


def train_directory(path: Path, settings: dict[str, Any], view: LiveView, label: str) -> None:
    """Trains the run at `path`, which is created if it does not exist; see `train_run`."""

    def open_or_create() -> RunDirectory:
        return RunDirectory.open(path) if path.exists() else create_run(path, settings)

    run = run_on_rank_zero(open_or_create)
    try:
        train_run(_training(run), run, view, label)
    finally:
        gc.collect()  # frees the model, which is in reference cycles


def create_run(path: Path, settings: dict[str, Any], launch: str | None = None) -> RunDirectory:
    """Creates the directory of a run, whose log says whether a higher score is better."""
    is_higher = get_recipe(settings["recipe"]).higher_is_better
    return RunDirectory.create(path, {**settings, "higher_is_better": is_higher}, launch)


def resume(path: Path, view: LiveView) -> None:
    """Resumes the run or the study at `path`."""
    if run_on_rank_zero((path / STUDY).exists):
        train_study(path, view)
        return
    run = run_on_rank_zero(lambda: RunDirectory.open(path))
    train_one(_training(run), run, view)


def _training(run: RunDirectory) -> Training:
    return build_training(run.path, settings_from(run.path / "settings.json", run.settings))


def settings_from(source: Path | str, values: dict[str, Any]) -> Settings:
    """The settings in a file, which must have all settings of their recipe.

    Raises:
        RunError: a setting is missing, unknown or invalid.
    """
    try:
        settings = Settings.from_dict(values)
        recipe_settings = get_recipe(settings.recipe).settings()
        if missing := recipe_settings.task.keys() - settings.task.keys():
            raise SettingError(f"settings {sorted(missing)} of task are missing")
        recipe_settings.with_changes(settings.task)  # checks names and types
        return settings
    except SettingError as error:
        raise RunError(f"{source}: {error}") from None


def build_training(path: Path, settings: Settings) -> Training:
    """The training of the run at `path`; required runs are relative to its folder."""
    recipe, folder = get_recipe(settings.recipe), path.resolve().parent
    required_runs = {name: str(folder / run) for name, run in settings.required_runs.items()}
    files = {name: path / file for name, file in recipe.saved_as.items()}
    saved_files = {name: str(file) for name, file in files.items() if file.is_file()}
    if run_on_rank_zero((path / "checkpoint.pt").exists):
        required_runs = dict.fromkeys(required_runs, "")  # no longer needed, and may be deleted
    return Training(recipe, settings.with_changes({**required_runs, **saved_files}))


def train_one(training: Training, run: RunDirectory, view: LiveView) -> None:
    """Trains one run and shows its table."""
    train_run(training, run, view, run.name)
    if is_rank_zero():
        _show_runs(run.path, view)
