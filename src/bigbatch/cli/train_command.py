"""`bigbatch train`: a recipe's study, or one training where a setting is given."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bigbatch.cli.dry_run_tables import show_dry_run
from bigbatch.cli.options import (
    DEAD_BAND,
    POLICY,
    SMOOTHING,
    WARM_UP,
    Data,
    Full,
    Out,
    Quiet,
    Result,
    Runs,
    as_typed,
    folder_of,
    given,
    note_overruled,
    recipe_of,
    refuse_with,
    set_by,
)
from bigbatch.errors import SettingError
from bigbatch.experiments import EXPERIMENTS
from bigbatch.experiments.build_optimizer import OPTIMIZERS
from bigbatch.experiments.process_group import count, from_leader
from bigbatch.experiments.recipe import SEEDS, Recipe
from bigbatch.experiments.settings import Settings
from bigbatch.experiments.study import resume as resume_at
from bigbatch.experiments.study import start_study, train_one, train_study, training_at
from bigbatch.experiments.torchrun import Launch
from bigbatch.experiments.unused_settings import unused_by_optimizer, unused_by_policy
from bigbatch.runs.atomic_files import release, reserve
from bigbatch.runs.console import LiveView, plain_console
from bigbatch.runs.run_directory import RunDirectory


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="One of `bigbatch recipes` [digits].")
    ] = None,
    policy: Annotated[str | None, typer.Option(help=POLICY)] = None,
    target: Annotated[float | None, typer.Option(help="Similarity to hold, in (-1, 1).")] = None,
    min_batch: Annotated[int | None, typer.Option(help="Least samples of a step.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most samples of a step.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Where the batch starts.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Most samples of a backward.")] = None,
    smoothing: Annotated[float | None, typer.Option(help=SMOOTHING)] = None,
    dead_band: Annotated[float | None, typer.Option(help=DEAD_BAND)] = None,
    warmup: Annotated[float | None, typer.Option(help=WARM_UP)] = None,
    virtual_ranks: Annotated[
        int | None, typer.Option(help="Ranks that samples are dealt to, however many there are.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"One of: {', '.join(OPTIMIZERS)}.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the base batch.")] = None,
    lr_scaling: Annotated[
        str | None, typer.Option(help="How it follows the batch: sqrt, linear, adascale, none.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Lower clip of a VR optimizer.")] = None,
    r_max: Annotated[float | None, typer.Option(help="Upper clip of a VR optimizer.")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Run whose weights the model begins with.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="One arm of the study alone.")] = None,
    result: Result = None,
    lr_control_from: Annotated[
        Path | None, typer.Option(help="Run with a VR optimizer whose mean r multiplies --lr.")
    ] = None,
    paper_scale: Full = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of config.yaml by its name."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a single training.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds of the study [3; with --paper-scale the paper's]."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.")
    ] = None,
    data: Data = None,
    runs_dir: Runs = None,
    run_dir: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run or study.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it would take; needs no data.")
    ] = False,
    dry_run_ranks: Annotated[
        int | None, typer.Option(min=1, help="Of a dry run [1; with --paper-scale the paper's].")
    ] = None,
    quiet: Quiet = False,
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
    view = LiveView(plain_console(), quiet=quiet)
    changes = given(
        policy=policy,
        target=target,
        min_batch=min_batch,
        max_batch=max_batch,
        batch_size=batch_size,
        micro_batch=micro_batch,
        smoothing=smoothing,
        dead_band=dead_band,
        warmup=warmup,
        virtual_ranks=virtual_ranks,
        optimizer=optimizer,
        lr=lr,
        lr_scaling=lr_scaling,
        gamma=gamma,
        r_max=r_max,
        init_from=init_from and str(init_from.resolve()),
        lr_control_from=lr_control_from and str(lr_control_from.resolve()),
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    if resume is not None:
        others = given(recipe=recipe, arm=arm, result=result, epochs=epochs, seeds=seeds, data=data)
        others |= given(
            paper_scale=paper_scale or None, set=set_, runs_dir=runs_dir, run_dir=run_dir
        )
        others |= given(dry_run=dry_run or None, dry_run_ranks=dry_run_ranks)
        refuse_with("--resume", [*changes, *others])
        with launch.resumable(resume):
            resume_at(resume, view)
        return
    if run_dir is not None:
        refuse_with("--run-dir", given(runs_dir=runs_dir))
    folder = runs_dir or Path("runs")
    if recipe in EXPERIMENTS:
        others = given(
            arm=arm, result=result, epochs=epochs, data=data, paper_scale=paper_scale or None
        )
        others |= given(set=set_)
        others |= given(dry_run=dry_run or None, dry_run_ranks=dry_run_ranks)
        refuse_with(f"recipe {recipe}, which is one fixed experiment,", [*changes, *others])
        _require_one_rank(recipe)
        _run_experiment(recipe, run_dir or reserve(folder, recipe), seeds or SEEDS, quiet=quiet)
        return
    chosen = recipe_of(recipe, result, paper_scale=paper_scale)
    changes |= given(arm=arm)
    asked = partial(_settings, chosen, epochs, set_ or [], changes)
    if dry_run:
        others = given(seeds=seeds, data=data, runs_dir=runs_dir, run_dir=run_dir)
        refuse_with("--dry-run, which trains nothing,", others)
        _require_one_rank("a dry run")
        scales = [True] if paper_scale else [False, True]
        show_dry_run(
            chosen,
            {scale: asked(paper_scale=scale) for scale in scales},
            dry_run_ranks,
            view.console,
        )
        return
    if dry_run_ranks is not None:
        raise SettingError(
            "--dry-run-ranks is of a dry run; torchrun --nproc_per_node starts real ones"
        )
    settings = asked(paper_scale=paper_scale)
    if changes:
        refuse_with(f"{as_typed(changes)}, of a single training,", given(seeds=seeds))
    settings = settings.changed({"data": folder_of(chosen, data)})
    if changes:
        _require_given(chosen, settings)
        _train_one(settings, folder, run_dir, launch, view)
        return
    repeats = seeds or chosen.seeds_at(paper_scale=paper_scale)
    overruled = set_by(settings, set_ or ())[1] | given(epochs=epochs).keys()
    place, begun = from_leader(
        lambda: launch.place(lambda: run_dir or reserve(folder, chosen.name, launch.id))
    )
    with launch.resumable(place):
        if not begun:
            from_leader(
                partial(
                    start_study,
                    chosen,
                    place,
                    settings,
                    repeats,
                    launch.id,
                    paper_scale=paper_scale,
                )
            )
            note_overruled(
                chosen, overruled, "--arm trains one alone with it", paper_scale=paper_scale
            )
        train_study(place, view)


def _run_experiment(name: str, place: Path, seeds: int, *, quiet: bool) -> None:
    """One that is no training over settings, in a directory that was reserved for it."""
    try:
        EXPERIMENTS[name].run(place, seeds, quiet)
    finally:
        release(place)


def _settings(
    recipe: Recipe,
    epochs: int | None,
    sets: list[str],
    changes: dict[str, Any],
    *,
    paper_scale: bool,
) -> Settings:
    """Those of a scale, changed by an arm, then by --set, then by other options."""
    settings = recipe.settings(paper_scale=paper_scale)
    if "arm" in changes:
        settings = recipe.arm(changes["arm"], settings, paper_scale=paper_scale)
    settings, names = set_by(settings.changed(given(epochs=epochs)), sets)
    settings = settings.changed(changes)
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
    for name, run in settings.before.items():
        if run in recipe.arm_names:
            raise SettingError(
                f"{name} of arm {settings.arm} is arm {run}; name a run of it by "
                f"--{name.replace('_', '-')}, or train the study, which has both"
            )


def _train_one(
    settings: Settings,
    runs_dir: Path,
    run_dir: Path | None,
    launch: Launch,
    view: LiveView,
) -> None:
    name = "-".join(
        [settings.recipe, settings.arm]
        if settings.arm
        else [settings.recipe, settings.policy.partition(":")[0], settings.optimizer]
    )
    place, begun = from_leader(
        lambda: launch.place(lambda: run_dir or reserve(runs_dir, name, launch.id))
    )
    if begun:
        with launch.resumable(place):
            resume_at(place, view)
        return
    with launch.resumable(place):
        training = training_at(place, settings)  # before anything is written
        run = from_leader(lambda: RunDirectory.create(place, settings.as_dict(), launch.id))
        train_one(training, run, view)


def _require_one_rank(experiment: str) -> None:
    if count() > 1:
        raise SettingError(
            f"{experiment} is nothing that {count()} ranks could share; run it without torchrun"
        )
