"""`bigbatch train`: the study of a recipe, or one run where a setting is given."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bigbatch.errors import SettingError
from bigbatch_recipes import EXPERIMENTS
from bigbatch_recipes.cli import options
from bigbatch_recipes.cli.dry_run_tables import show_dry_run
from bigbatch_recipes.cli.options import refuse_options
from bigbatch_recipes.console import LiveView, plain_console
from bigbatch_recipes.output_directory import release, reserve
from bigbatch_recipes.process_group import run_on_rank_zero, world_size
from bigbatch_recipes.recipe import SEEDS, Recipe
from bigbatch_recipes.settings import SETTING_TYPES, Settings
from bigbatch_recipes.study import build_training, create_run, start_study, train_one, train_study
from bigbatch_recipes.study import resume as resume_at
from bigbatch_recipes.torchrun import Launch
from bigbatch_recipes.validate import unused_by_optimizer, unused_by_policy


@options.with_settings(
    *(name for name in SETTING_TYPES if name not in ("recipe", "arm", "data", "task"))
)
def train(
    context: typer.Context,
    recipe: options.RecipeName = None,
    arm: Annotated[str | None, typer.Option(help="Train one arm of the study alone.")] = None,
    set_: options.Set = None,
    seeds: options.Seeds = None,
    paper_scale: options.PaperScale = False,
    result: options.Result = None,
    data: options.Data = None,
    runs_dir: options.RunsDir = None,
    run_dir: options.RunDir = None,
    resume: Annotated[
        Path | None, typer.Option(help="Directory of a run, study or sweep to resume.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show sizes, batches and memory; needs no data.")
    ] = False,
    dry_run_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a dry run [1; with --paper-scale, the paper's]."),
    ] = None,
    quiet: options.Quiet = False,
    **texts: str | None,
) -> None:
    """Trains the study of a recipe, or one run where a setting is given.

    bigbatch train                             the digits study, 3 seeds
    bigbatch train digits --seeds 5            the same with 5 seeds
    bigbatch train digits --target 0.5         one run with another setting
    bigbatch train --resume runs/digits-1      continues after an interruption
    bigbatch train linear-regression           figures 1 and 3 of the VRGD paper
    bigbatch train squad --data DIR            another recipe of bigbatch list
    bigbatch train squad --dry-run             its memory and batches; no data
    bigbatch train cifar10-resnet18 --paper-scale --data DIR --arm simigrad
    bigbatch train cifar10-resnet56 --paper-scale --result figure-2 --dry-run
    torchrun --nproc_per_node 2 -m bigbatch train digits
    """
    launch: Launch = context.obj
    view = LiveView(plain_console(), quiet=quiet)
    option_names = options.names_on_command_line(context) - {"quiet"}
    if resume is not None:
        refuse_options("--resume", option_names - {"resume"})
        with launch.resumable(resume):
            resume_at(resume, view)
        return
    if run_dir is not None:
        refuse_options("--run-dir", option_names & {"runs_dir"})
    folder = runs_dir or Path("runs")
    if recipe in EXPERIMENTS:
        allowed = {"recipe", "seeds", "runs_dir", "run_dir"}
        refuse_options(f"recipe {recipe}, which is one fixed experiment,", option_names - allowed)
        _run_experiment(recipe, folder, run_dir, seeds or SEEDS, quiet=quiet)
        return
    chosen = options.select_recipe(recipe, result, paper_scale=paper_scale)
    changes = options.parse_settings(texts)
    epochs = {"epochs": changes.pop("epochs")} if "epochs" in changes else {}
    changes |= {"arm": arm} if arm is not None else {}
    settings_at = partial(_settings, chosen, epochs, set_ or [], changes)
    if dry_run:
        unused = option_names & {"seeds", "data", "runs_dir", "run_dir"}
        refuse_options("--dry-run, which trains nothing,", unused)
        _require_one_rank("a dry run")
        by_scale = {scale: settings_at(paper_scale=scale) for scale in sorted({paper_scale, True})}
        show_dry_run(chosen, by_scale, dry_run_ranks, view.console)
        return
    if dry_run_ranks is not None:
        raise SettingError(
            "--dry-run-ranks is for dry runs; add --dry-run, or train by torchrun --nproc_per_node"
        )
    settings = settings_at(paper_scale=paper_scale)
    if changes:
        single = f"{options.format_options(changes)}, of a single training,"
        refuse_options(single, option_names & {"seeds"})
    settings = settings.with_changes({"data": options.find_data(chosen, data)})
    if changes:
        _require_runs(chosen, settings)
        _train_one(settings, folder, run_dir, launch, view)
        return
    path, has_begun = _choose_path(launch, run_dir, folder, chosen.name)
    seeds = seeds or chosen.seeds_at(paper_scale=paper_scale)
    start = partial(start_study, chosen, path, settings, seeds, launch.id)
    with launch.resumable(path):
        if not has_begun:
            run_on_rank_zero(partial(start, paper_scale=paper_scale))
            names = options.apply_set_options(settings, set_ or ())[1] | epochs.keys()
            remedy = "--arm trains one alone with it"
            options.warn_of_arm_values(chosen, names, remedy, paper_scale=paper_scale)
        train_study(path, view)


def _run_experiment(
    name: str, runs_dir: Path, run_dir: Path | None, seeds: int, *, quiet: bool
) -> None:
    _require_one_rank(name)
    path = run_dir or reserve(runs_dir, name)
    try:
        EXPERIMENTS[name].run(path, seeds, quiet)
    finally:
        release(path)


def _settings(
    recipe: Recipe,
    epochs: dict[str, Any],
    sets: list[str],
    changes: dict[str, Any],
    *,
    paper_scale: bool,
) -> Settings:
    """The settings of a scale, changed by the arm, then by --set, then by other options."""
    settings = recipe.settings(paper_scale=paper_scale)
    if "arm" in changes:
        settings = recipe.arm(changes["arm"], settings, paper_scale=paper_scale)
    settings, set_names = options.apply_set_options(settings.with_changes(epochs), sets)
    settings = settings.with_changes(changes)
    if not changes:
        return settings  # of a study, in which an arm may use a setting that others do not
    for name, unused_by in (("policy", unused_by_policy), ("optimizer", unused_by_optimizer)):
        value, alternative = getattr(settings, name), ""
        if name in changes:
            reason = f"--{name} {value}"
        elif name in set_names:
            reason = f"--set {name}={value}"
        else:
            owner = f"--arm {changes['arm']}" if "arm" in changes else f"recipe {recipe.name}"
            reason, alternative = (
                f"{owner}, whose {name} is {value},",
                f", or give another --{name}",
            )
        unused = (changes.keys() | set_names) & unused_by(value)
        refuse_options(reason, unused, set_names - changes.keys(), alternative)
    return settings


def _require_runs(recipe: Recipe, settings: Settings) -> None:
    """Raises SettingError where one arm needs a run that its study would train before."""
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
    path, has_begun = _choose_path(launch, run_dir, runs_dir, name)
    with launch.resumable(path):
        if has_begun:
            resume_at(path, view)
            return
        training = build_training(path, settings)  # before anything is written
        run = run_on_rank_zero(lambda: create_run(path, settings.as_dict(), launch.id))
        train_one(training, run, view)


def _choose_path(
    launch: Launch, run_dir: Path | None, runs_dir: Path, name: str
) -> tuple[Path, bool]:
    """The directory to train in, and whether workers before a restart have begun there."""
    return run_on_rank_zero(
        lambda: launch.choose_directory(lambda: run_dir or reserve(runs_dir, name, launch.id))
    )


def _require_one_rank(experiment: str) -> None:
    if world_size() > 1:
        raise SettingError(
            f"{experiment} cannot be shared by {world_size()} ranks; run it without torchrun"
        )
