"""`bigbatch train`: the study of a recipe, or one run where a setting is given."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bigbatch.errors import SettingError
from bigbatch_recipes.cli import options
from bigbatch_recipes.cli.options import CommandParser, refuse_options
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.new_directory import release
from bigbatch_recipes.process_group import run_on_rank_zero, world_size
from bigbatch_recipes.recipe import SEEDS, Recipe
from bigbatch_recipes.recipe_registry import EXPERIMENTS
from bigbatch_recipes.settings import Settings, policy_name, unused_in
from bigbatch_recipes.torchrun import Launch

_EXAMPLES = """\
  bigbatch train                             the digits study, 3 seeds
  bigbatch train digits --seeds 5            the same with 5 seeds
  bigbatch train digits --target 0.5         one run with another setting
  bigbatch train digits --policy mine.py:MyPolicy   a policy of your own
  bigbatch train --resume runs/digits-1      continues after an interruption
  bigbatch train linear-regression           figures 1 and 3 of the VRGD paper
  bigbatch train squad --data DIR            another recipe of bigbatch list
  bigbatch train squad --dry-run             its size and batches; no data
  bigbatch train cifar10-resnet18 --paper-scale --data DIR --arm simigrad
  bigbatch train cifar10-resnet56 --paper-scale --result figure-2 --dry-run
  torchrun --nproc_per_node 2 -m bigbatch train digits"""


def train_parser() -> CommandParser:
    """The options of `train`."""
    text = "Trains the study of a recipe, or one run where a setting is given."
    parser = CommandParser("train", text, _EXAMPLES)
    parser.add_argument("--arm", help="train one arm of the study alone")
    parser.add_path("--resume", "directory of a run, study or sweep to resume")
    parser.add_flag("--dry-run", "show settings, sizes, batches; train nothing")
    parser.add_count("--dry-run-ranks", "ranks of a dry run [1; with --paper-scale, the paper's]")
    parser.add_training()
    return parser


def train(arguments: list[str], launch: Launch) -> None:
    """Runs `bigbatch train`; torch is imported after what can be refused without it."""
    given = train_parser().given(arguments)
    view, is_dry = LiveView(quiet=given.pop("quiet", False)), given.pop("dry_run", False)
    if is_dry:
        _require_one_rank("a dry run")
    elif "dry_run_ranks" in given:
        raise SettingError(
            "--dry-run-ranks is for dry runs; add --dry-run, or train by torchrun --nproc_per_node"
        )
    if "resume" in given:
        _resume(given, view, launch, is_dry=is_dry)
        return
    options.require_new(given)
    if given.get("recipe") in EXPERIMENTS:
        _run_experiment(given, view, is_dry=is_dry)
        return
    recipe = options.select_recipe(given)
    settings, chosen, names = options.select_settings(recipe, given)
    own = (chosen - {"epochs"}) | (given.keys() & {"arm"})  # of a single training, not of the study
    seeds = given.get("seeds") or recipe.seeds
    if own:
        _require_effect(settings, names)
        single = f"{options.format_options(own)}, of a single training,"
        refuse_options(single, given.keys() & {"seeds"})
        if not is_dry:
            _require_runs(recipe, settings)
    if "data" in given or not is_dry:
        settings = settings.with_changes({"data": options.find_data(recipe, given.get("data"))})
    if is_dry:
        from bigbatch_recipes.dry_run import show_dry_run

        show_dry_run(recipe, settings, given.get("dry_run_ranks"), seeds, view)
        return
    from bigbatch_recipes import study

    name = _run_name(settings) if own else recipe.name
    path, has_begun = run_on_rank_zero(
        lambda: launch.choose_directory(lambda: options.new_directory(given, name, launch.id))
    )
    with launch.resumable(path):
        if has_begun:
            study.resume(path, view)
        elif own:
            training = study.build_training(path, settings)  # before anything is written
            run = run_on_rank_zero(lambda: study.create_run(path, settings.as_dict(), launch.id))
            study.train_one(training, run, view)
        else:
            run_on_rank_zero(lambda: study.start_study(recipe, path, settings, seeds, launch.id))
            options.warn_of_arm_values(recipe, names, "--arm trains one alone with it")
            study.train_study(path, view)


def _resume(given: Mapping[str, Any], view: LiveView, launch: Launch, *, is_dry: bool) -> None:
    path = given["resume"]
    refuse_options("--resume", given.keys() - {"resume", "dry_run_ranks"})
    options.require_resumable(path)
    if is_dry:
        from bigbatch_recipes.dry_run import show_resumption

        show_resumption(path, view)
        return
    from bigbatch_recipes import study

    with launch.resumable(path):
        study.resume(path, view)


def _run_experiment(given: Mapping[str, Any], view: LiveView, *, is_dry: bool) -> None:
    name, seeds = given["recipe"], given.get("seeds", SEEDS)
    allowed = {"recipe", "seeds", "runs_dir", "run_dir", "dry_run_ranks"}
    refuse_options(f"recipe {name}, which is one fixed experiment,", given.keys() - allowed)
    if is_dry:
        view.print(f"{name}: {EXPERIMENTS[name]}; {seeds} seeds")
        return
    _require_one_rank(name)
    path = options.new_directory(given, name)
    try:
        module = import_module(f"bigbatch_recipes.{name.replace('-', '_')}")
        view.table(module.run(path, seeds), f"{name}: {EXPERIMENTS[name]}")
        view.print(f"table and figures: {path}")
    finally:
        release(path)


def _require_effect(settings: Settings, names: set[str]) -> None:
    """Raises SettingError where a training has no use for a setting; another arm may have one."""
    if unused := sorted(unused_in(settings) & names):
        raise SettingError(
            f"{', '.join(unused)} has no effect with policy={settings.policy} "
            f"and optimizer={settings.optimizer}; leave it out, or choose others"
        )


def _require_runs(recipe: Recipe, settings: Settings) -> None:
    """Raises SettingError where one arm needs a run that its study would train before."""
    for name, run in settings.required_runs.items():
        if run in recipe.arm_names:
            raise SettingError(
                f"{name} of arm {settings.arm} is arm {run}; name a run of it by "
                f"--{name.replace('_', '-')}, or train the study, which has both"
            )


def _run_name(settings: Settings) -> str:
    own = [settings.arm] if settings.arm else [policy_name(settings.policy), settings.optimizer]
    return "-".join([settings.recipe, *own])


def _require_one_rank(experiment: str) -> None:
    if world_size() > 1:
        raise SettingError(
            f"{experiment} cannot be shared by {world_size()} ranks; run it without torchrun"
        )
