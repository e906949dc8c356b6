"""A study: the arms of a recipe over several seeds, one training after another.

On several ranks all call the same; rank 0 reads, writes and shows.
"""

import gc
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments import recipe_named
from bigbatch.experiments.process_group import from_leader, leads
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.train_run import Training, train_run
from bigbatch.experiments.validate import require_trainable
from bigbatch.runs.atomic_files import create_directory_atomically, write_atomically
from bigbatch.runs.console import LiveView
from bigbatch.runs.html_report import write_report, write_sweep_files
from bigbatch.runs.metrics import history_of, seeds_of, table_of
from bigbatch.runs.run_config import config_yaml, read_trainings
from bigbatch.runs.run_directory import RunDirectory, find_runs
from bigbatch.runs.sweep_results import SweepResults, read_sweep_results


def start_study(
    recipe: Recipe,
    path: Path,
    settings: Settings,
    seeds: int,
    launch: str | None = None,
    *,
    paper_scale: bool = False,
) -> None:
    """Writes down what the study at `path` will train, and which launch of torchrun began it.

    Args:
        recipe: whose arms.
        path: the directory to make.
        settings: that the arms change; of the paper's scale where `paper_scale`.
        seeds: 0 and on.
        launch: of torchrun.
        paper_scale: whether the arms are those of the paper's scale.

    Raises:
        RunError: something is at `path` already.
        SettingError: an arm cannot be trained with these settings.
    """
    arms = recipe.arms_at(paper_scale=paper_scale)

    def trained(arm: str, seed: int) -> Settings:
        asked = recipe.arm(arm, settings, paper_scale=paper_scale)
        before = {name: f"{run}-seed{seed}" for name, run in asked.before.items() if run in arms}
        return asked.changed({"seed": seed, **before})

    require_trainable(recipe, *(trained(arm, 0) for arm in arms))
    trainings = {f"{arm}-seed{seed}": trained(arm, seed) for seed in range(seeds) for arm in arms}
    write_study(path, trainings, launch)


def write_study(
    path: Path,
    trainings: dict[str, Settings],
    launch: str | None = None,
    sweep: dict[str, Any] | None = None,
) -> None:
    """Writes down the trainings of a study, by the names of their directories.

    Args:
        path: of the study.
        trainings: their settings.
        launch: of torchrun that began it.
        sweep: what `read_sweep` of runs/run_config.py reads, where the study is one.
    Raises:
        RunError: something is at `path` already, or a run that a training needs is nowhere.
    """
    for settings in trainings.values():
        for run in settings.before.values():
            if run not in trainings:
                RunDirectory.open(path / run)
    with create_directory_atomically(path) as directory:
        listed = {name: settings.as_dict() for name, settings in trainings.items()}
        about = {"trainings": listed, **({"sweep": sweep} if sweep else {})}
        text = config_yaml("study", about, launch)
        write_atomically(directory / "study.yaml", text)


def train_study(path: Path, view: LiveView) -> None:
    """Trains what is not finished yet, then shows the table and writes the report.

    Raises:
        RunError: `path` holds no study, or another process trains in it.
    """
    trainings = from_leader(lambda: read_trainings(path))
    for number, (name, settings) in enumerate(trainings.items(), start=1):
        run = from_leader(partial(opened, path / name, settings))
        train_run(_training(run), run, view, f"{number}/{len(trainings)} {name}")
        gc.collect()  # its model is in cycles, and a GPU has no room for two
    if leads():
        report_study(path, view)


def report_study(path: Path, view: LiveView) -> None:
    """Writes and shows what there is of the study at `path`; of a sweep a figure and tables too.

    Raises:
        RunError: nothing is logged yet, or a file is damaged or cannot be written.
    """
    sweep = read_sweep_results(path)
    if sweep is not None and not sweep.begun:
        view.print(f"{path.name}: no run has logged a step, so there is nothing to report")
        return
    if sweep is None:
        write_report(find_runs(path), path / "report.html", path.name)
    else:
        write_sweep_files(sweep, path)
        write_report(sweep.drawn, path / "report.html", path.name, [sweep])
    _show(path, sweep, view)


def _show(path: Path, sweep: SweepResults | None, view: LiveView) -> None:
    """The table of what is at `path`, and where its report lies."""
    if sweep is not None:
        view.table(sweep.table(), f"{path.name}: {sweep.title}")
        view.print(f"figure: {path / 'sweep.png'}")
    else:
        histories = [history_of(run) for run in find_runs(path)]
        view.table(table_of(histories), f"{path.name}: {seeds_of(histories)}")
    view.print(f"report: {path / 'report.html'}")


def opened(place: Path, settings: dict[str, Any]) -> RunDirectory:
    """The run directory at `place`, made if there is none."""
    return RunDirectory.open(place) if place.exists() else RunDirectory.create(place, settings)


def resume(path: Path, view: LiveView) -> None:
    """Resumes a run or a study, whichever is at `path`.

    Raises:
        RunError: it is neither.
    """
    if from_leader((path / "study.yaml").exists):
        train_study(path, view)
        return
    run = from_leader(lambda: RunDirectory.open(path))
    train_one(_training(run), run, view)


def _training(run: RunDirectory) -> Training:
    return training_at(run.path, settings_in(run.path / "config.yaml", run.settings))


def settings_in(place: Path | str, values: dict[str, Any]) -> Settings:
    """The settings that a file holds, with all that the recipe they name has.

    Raises:
        RunError: they cannot be trained with.
    """
    try:
        settings = Settings.from_dict(values)
        own = recipe_named(settings.recipe).settings()
        if missing := own.task.keys() - settings.task.keys():
            raise SettingError(f"settings {sorted(missing)} of task are missing")
        own.changed(settings.task)  # whose types are the recipe's
        return settings
    except SettingError as error:
        raise RunError(f"{place}: {error}") from None


def training_at(place: Path, settings: Settings) -> Training:
    """A training whose run lies at `place`: what it needs is next to it, what it kept is in it."""
    recipe, folder = recipe_named(settings.recipe), place.resolve().parent  # where it lies now
    before = {name: str(folder / path) for name, path in settings.before.items()}
    own = {name: place / file for name, file in recipe.kept_as.items()}
    kept = {name: str(file) for name, file in own.items() if file.is_file()}
    if from_leader((place / "checkpoint.pt").exists):
        before = dict.fromkeys(before, "")  # they did their part, and may be gone
    return Training(recipe, settings.changed({**before, **kept}))


def train_one(training: Training, run: RunDirectory, view: LiveView) -> None:
    """Trains one run and shows its table."""
    train_run(training, run, view, run.name)
    if leads():
        _show(run.path, None, view)
