"""A study: the arms of a recipe over several seeds, one training after another.

On several ranks all call the same; rank 0 reads, writes and shows.
"""

import gc
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments import get_recipe
from bigbatch.experiments.process_group import is_rank_zero, run_on_rank_zero
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.train_run import Training, train_run
from bigbatch.experiments.validate import require_trainable
from bigbatch.runs.atomic_files import made_whole, write_atomically
from bigbatch.runs.console import LiveView
from bigbatch.runs.html_report import write_report, write_swept
from bigbatch.runs.metrics import history_of, seeds_of, table_of
from bigbatch.runs.run_config import describe, read_trainings
from bigbatch.runs.run_directory import RunDirectory, find_runs
from bigbatch.runs.sweep_results import Swept, read_swept


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
        before = {
            name: f"{run}-seed{seed}" for name, run in asked.required_runs.items() if run in arms
        }
        return asked.with_changes({"seed": seed, **before})

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
        for run in settings.required_runs.values():
            if run not in trainings:
                RunDirectory.open(path / run)
    with made_whole(path) as making:
        listed = {name: settings.as_dict() for name, settings in trainings.items()}
        about = {"trainings": listed, **({"sweep": sweep} if sweep else {})}
        text = describe("study", about, launch)
        write_atomically(making / "study.yaml", text)


def train_study(path: Path, view: LiveView) -> None:
    """Trains what is not finished yet, then shows the table and writes the report.

    Raises:
        RunError: `path` holds no study, or another process trains in it.
    """
    trainings = run_on_rank_zero(lambda: read_trainings(path))
    for number, (name, settings) in enumerate(trainings.items(), start=1):
        run = run_on_rank_zero(partial(open_or_create_run, path / name, settings))
        train_run(_training(run), run, view, f"{number}/{len(trainings)} {name}")
        gc.collect()  # its model is in cycles, and a GPU has no room for two
    if is_rank_zero():
        report_study(path, view)


def report_study(path: Path, view: LiveView) -> None:
    """Writes and shows what there is of the study at `path`; of a sweep a figure and tables too.

    Raises:
        RunError: nothing is logged yet, or a file is damaged or cannot be written.
    """
    sweep = read_swept(path)
    if sweep is not None and not sweep.begun:
        view.say(f"{path.name}: no run has logged a step, so there is nothing to report")
        return
    if sweep is None:
        write_report(find_runs(path), path / "report.html", path.name)
    else:
        write_swept(sweep, path)
        write_report(sweep.drawn, path / "report.html", path.name, [sweep])
    _show(path, sweep, view)


def _show(path: Path, sweep: Swept | None, view: LiveView) -> None:
    """The table of what is at `path`, and where its report lies."""
    if sweep is not None:
        view.table(sweep.table(), f"{path.name}: {sweep.title}")
        view.say(f"figure: {path / 'sweep.png'}")
    else:
        histories = [history_of(run) for run in find_runs(path)]
        view.table(table_of(histories), f"{path.name}: {seeds_of(histories)}")
    view.say(f"report: {path / 'report.html'}")


def open_or_create_run(place: Path, settings: dict[str, Any]) -> RunDirectory:
    """The run directory at `place`, made if there is none."""
    return RunDirectory.open(place) if place.exists() else RunDirectory.create(place, settings)


def resume(path: Path, view: LiveView) -> None:
    """Resumes a run or a study, whichever is at `path`.

    Raises:
        RunError: it is neither.
    """
    if run_on_rank_zero((path / "study.yaml").exists):
        train_study(path, view)
        return
    run = run_on_rank_zero(lambda: RunDirectory.open(path))
    train_one(_training(run), run, view)


def _training(run: RunDirectory) -> Training:
    return build_training(run.path, settings_from(run.path / "config.yaml", run.settings))


def settings_from(place: Path | str, values: dict[str, Any]) -> Settings:
    """The settings that a file holds, with all that the recipe they name has.

    Raises:
        RunError: they cannot be trained with.
    """
    try:
        settings = Settings.from_dict(values)
        own = get_recipe(settings.recipe).settings()
        if missing := own.task.keys() - settings.task.keys():
            raise SettingError(f"settings {sorted(missing)} of task are missing")
        own.with_changes(settings.task)  # whose types are the recipe's
        return settings
    except SettingError as error:
        raise RunError(f"{place}: {error}") from None


def build_training(place: Path, settings: Settings) -> Training:
    """A training whose run lies at `place`: what it needs is next to it, what it kept is in it."""
    recipe, folder = get_recipe(settings.recipe), place.resolve().parent  # where it lies now
    before = {name: str(folder / path) for name, path in settings.required_runs.items()}
    own = {name: place / file for name, file in recipe.saved_as.items()}
    kept = {name: str(file) for name, file in own.items() if file.is_file()}
    if run_on_rank_zero((place / "checkpoint.pt").exists):
        before = dict.fromkeys(before, "")  # they did their part, and may be gone
    return Training(recipe, settings.with_changes({**before, **kept}))


def train_one(training: Training, run: RunDirectory, view: LiveView) -> None:
    """Trains one run and shows its table."""
    train_run(training, run, view, run.name)
    if is_rank_zero():
        _show(run.path, None, view)
