"""`bigbatch train`: a recipe's study, or one training where a setting is given."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bigbatch.cli.dry_run_tables import show_dry_run
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
from bigbatch.errors import SettingError
from bigbatch.experiments import EXPERIMENTS
from bigbatch.experiments.process_group import run_on_rank_zero, world_size
from bigbatch.experiments.recipe import SEEDS, Recipe
from bigbatch.experiments.settings import SETTING_TYPES, Settings
from bigbatch.experiments.study import build_training, start_study, train_one, train_study
from bigbatch.experiments.study import resume as resume_at
from bigbatch.experiments.torchrun import Launch
from bigbatch.experiments.validate import unused_by_optimizer, unused_by_policy
from bigbatch.runs.atomic_files import release, reserve
from bigbatch.runs.console import LiveView, plain_console
from bigbatch.runs.run_directory import RunDirectory


@with_settings(*(name for name in SETTING_TYPES if name not in ("recipe", "arm", "data", "task")))
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="One of `bigbatch recipes` [digits].")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="One arm of the study alone.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of all trainings of a study."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds of the study [3; with --paper-scale the paper's]."),
    ] = None,
    paper_scale: Full = False,
    result: Result = None,
    data: Data = None,
    runs_dir: Runs = None,
    run_dir: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run or study.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it would take; needs no data.")
    ] = False,
    dry_run_ranks: Annotated[
        int | None, typer.Option(min=1, help="Of a dry run [1; with --paper-scale the paper's].")
    ] = None,
    quiet: Quiet = False,
    **texts: str | None,
) -> None:
    """Trains a recipe: its whole study, or one training where a setting is given.

    The digits study, 3 seeds: bigbatch train

    The same with 5 seeds: bigbatch train digits --seeds 5

    One training of your own: bigbatch train digits --target 0.5 --optimizer vr-adam

    At the paper's scale: bigbatch train cifar10-resnet18 --paper-scale --data DIR --arm simigrad

    What that would take, without any data: bigbatch train cifar10-resnet18 --dry-run

    One figure: bigbatch train cifar10-resnet56 --paper-scale --result figure-2 --dry-run

    Figures 1 and 3 of the VRGD paper: bigbatch train linear-regression

    On two ranks: torchrun --nproc_per_node 2 -m bigbatch train digits

    After an interruption: bigbatch train --resume runs/digits-1
    """
    launch: Launch = context.obj
    view, typed = LiveView(plain_console(), quiet=quiet), typed_in(context) - {"quiet"}
    if resume is not None:
        refuse_with("--resume", typed - {"resume"})
        with launch.resumable(resume):
            resume_at(resume, view)
        return
    if run_dir is not None:
        refuse_with("--run-dir", typed & {"runs_dir"})
    folder = runs_dir or Path("runs")
    if recipe in EXPERIMENTS:
        allowed = {"recipe", "seeds", "runs_dir", "run_dir"}
        refuse_with(f"recipe {recipe}, which is one fixed experiment,", typed - allowed)
        _require_one_rank(recipe)
        _run_experiment(recipe, run_dir or reserve(folder, recipe), seeds or SEEDS, quiet=quiet)
        return
    chosen, changes = recipe_of(recipe, result, paper_scale=paper_scale), settings_of(texts)
    epochs = {"epochs": changes.pop("epochs")} if "epochs" in changes else {}
    changes |= {"arm": arm} if arm is not None else {}
    asked = partial(_settings, chosen, epochs, set_ or [], changes)
    if dry_run:
        needless = typed & {"seeds", "data", "runs_dir", "run_dir"}
        refuse_with("--dry-run, which trains nothing,", needless)
        _require_one_rank("a dry run")
        scales = {paper_scale, True}
        by_scale = {scale: asked(paper_scale=scale) for scale in sorted(scales)}
        show_dry_run(chosen, by_scale, dry_run_ranks, view.console)
        return
    if dry_run_ranks is not None:
        raise SettingError(
            "--dry-run-ranks is of a dry run; torchrun --nproc_per_node starts real ones"
        )
    settings = asked(paper_scale=paper_scale)
    if changes:
        refuse_with(f"{as_typed(changes)}, of a single training,", typed & {"seeds"})
    settings = settings.with_changes({"data": folder_of(chosen, data)})
    if changes:
        _require_given(chosen, settings)
        _train_one(settings, folder, run_dir, launch, view)
        return
    place, begun = _place(launch, run_dir, folder, chosen.name)
    repeats = seeds or chosen.seeds_at(paper_scale=paper_scale)
    start = partial(start_study, chosen, place, settings, repeats, launch.id)
    with launch.resumable(place):
        if not begun:
            run_on_rank_zero(partial(start, paper_scale=paper_scale))
            overruled = set_by(settings, set_ or ())[1] | epochs.keys()
            remedy = "--arm trains one alone with it"
            note_overruled(chosen, overruled, remedy, paper_scale=paper_scale)
        train_study(place, view)


def _run_experiment(name: str, place: Path, seeds: int, *, quiet: bool) -> None:
    """One that is no training over settings, in a directory that was reserved for it."""
    try:
        EXPERIMENTS[name].run(place, seeds, quiet)
    finally:
        release(place)


def _settings(
    recipe: Recipe,
    epochs: dict[str, Any],
    sets: list[str],
    changes: dict[str, Any],
    *,
    paper_scale: bool,
) -> Settings:
    """Those of a scale, changed by an arm, then by --set, then by other options."""
    settings = recipe.settings(paper_scale=paper_scale)
    if "arm" in changes:
        settings = recipe.arm(changes["arm"], settings, paper_scale=paper_scale)
    settings, names = set_by(settings.with_changes(epochs), sets)
    settings = settings.with_changes(changes)
    if not changes:
        return settings  # of a study, some arm may listen
    for what, unused in (("policy", unused_by_policy), ("optimizer", unused_by_optimizer)):
        value = getattr(settings, what)
        idle = (changes.keys() | names) & unused(value)
        said, or_ = _said(recipe, what, value, changes, names)
        refuse_with(said, idle, names - changes.keys(), or_)
    return settings


def _said(
    recipe: Recipe, what: str, value: str, changes: dict[str, Any], names: set[str]
) -> tuple[str, str]:
    """Who chose the policy or the optimizer, as it was typed; and what to give for another."""
    if what in changes:
        return f"--{what} {value}", ""
    if what in names:
        return f"--set {what}={value}", ""
    whose = f"--arm {changes['arm']}" if "arm" in changes else f"recipe {recipe.name}"
    return f"{whose}, whose {what} is {value},", f", or give another --{what}"


def _require_given(recipe: Recipe, settings: Settings) -> None:
    """Raises SettingError where an arm alone needs a run that its study would have trained."""
    for name, run in settings.required_runs.items():
        if run in recipe.arm_names:
            raise SettingError(
                f"{name} of arm {settings.arm} is arm {run}; name a run of it by "
                f"--{name.replace('_', '-')}, or train the study, which has both"
            )


def _train_one(
    settings: Settings, runs_dir: Path, run_dir: Path | None, launch: Launch, view: LiveView
) -> None:
    name = "-".join(
        [settings.recipe, settings.arm]
        if settings.arm
        else [settings.recipe, settings.policy, settings.optimizer]
    )
    place, begun = _place(launch, run_dir, runs_dir, name)
    with launch.resumable(place):
        if begun:
            resume_at(place, view)
            return
        training = build_training(place, settings)  # before anything is written
        run = run_on_rank_zero(lambda: RunDirectory.create(place, settings.as_dict(), launch.id))
        train_one(training, run, view)


def _place(launch: Launch, run_dir: Path | None, runs_dir: Path, name: str) -> tuple[Path, bool]:
    """Where it is to be written, and whether an earlier start of this launch began it there."""
    return run_on_rank_zero(
        lambda: launch.choose_directory(lambda: run_dir or reserve(runs_dir, name, launch.id))
    )


def _require_one_rank(experiment: str) -> None:
    if world_size() > 1:
        raise SettingError(
            f"{experiment} cannot be shared by {world_size()} ranks; run it without torchrun"
        )
