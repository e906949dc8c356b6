"""`bigbatch train`: the study of a recipe, or one run where a setting is given."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bigbatch.errors import SettingError
from bigbatch_recipes import EXPERIMENTS
from bigbatch_recipes.cli import options
from bigbatch_recipes.cli.options import CommandParser, refuse_options
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.new_directory import release, require_free, reserve
from bigbatch_recipes.process_group import run_on_rank_zero, world_size
from bigbatch_recipes.recipe import SEEDS, Recipe
from bigbatch_recipes.settings import Settings, policy_name, unused_in
from bigbatch_recipes.torchrun import Launch, is_single_process

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
_NO_SETTINGS = ("recipe", "arm", "data", "task")  # for which the command has other options


def train_parser() -> CommandParser:
    """The options of `train`."""
    text = "Trains the study of a recipe, or one run where a setting is given."
    parser = CommandParser("train", text, _EXAMPLES)
    parser.add_argument("--arm", help="train one arm of the study alone")
    parser.add_path("--resume", "directory of a run, study or sweep to resume")
    parser.add_flag("--dry-run", "show settings, sizes, batches; train nothing")
    parser.add_count("--dry-run-ranks", "ranks of a dry run [1; with --paper-scale, the paper's]")
    parser.add_training(*_NO_SETTINGS)
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
        refuse_options("--resume", given.keys() - {"resume", "dry_run_ranks"})
        options.require_resumable(given["resume"])
        if is_dry:
            from bigbatch_recipes.dry_run import show_resumption

            show_resumption(given["resume"], view)
            return
        from bigbatch_recipes import study

        with launch.resumable(given["resume"]):
            study.resume(given["resume"], view)
        return
    run_dir, folder = given.get("run_dir"), given.get("runs_dir", Path("runs"))
    if run_dir is not None:
        refuse_options("--run-dir", given.keys() & {"runs_dir"})
        if is_single_process():  # else a launch may continue it
            require_free(run_dir)
    name, scale = given.get("recipe"), given.get("paper_scale", False)
    if name in EXPERIMENTS:
        allowed = {"recipe", "seeds", "runs_dir", "run_dir", "dry_run_ranks"}
        refuse_options(f"recipe {name}, which is one fixed experiment,", given.keys() - allowed)
        if is_dry:
            view.print(f"{name}: {EXPERIMENTS[name].summary}; {given.get('seeds', SEEDS)} seeds")
        else:
            _run_experiment(name, run_dir or reserve(folder, name), given.get("seeds", SEEDS), view)
        return
    recipe = options.select_recipe(name, given.get("result"), paper_scale=scale)
    settings, own, names = _settings(recipe, given, paper_scale=scale)
    seeds = given.get("seeds") or recipe.seeds_at(paper_scale=scale)
    if own:
        single = f"{options.format_options(own)}, of a single training,"
        refuse_options(single, given.keys() & {"seeds"})
    if own and not is_dry:
        _require_runs(recipe, settings)
    if "data" in given or not is_dry:
        settings = settings.with_changes({"data": options.find_data(recipe, given.get("data"))})
    if is_dry:
        from bigbatch_recipes.dry_run import show_dry_run

        ranks = given.get("dry_run_ranks")
        show_dry_run(recipe, settings, ranks, view, seeds=seeds, paper_scale=scale)
        return
    from bigbatch_recipes import study

    name = _run_name(settings) if own else recipe.name
    path, has_begun = run_on_rank_zero(
        lambda: launch.choose_directory(lambda: run_dir or reserve(folder, name, launch.id))
    )
    with launch.resumable(path):
        if has_begun:
            study.resume(path, view)
        elif own:
            training = study.build_training(path, settings)  # before anything is written
            run = run_on_rank_zero(lambda: study.create_run(path, settings.as_dict(), launch.id))
            study.train_one(training, run, view)
        else:
            start = partial(study.start_study, recipe, path, settings, seeds, launch.id)
            run_on_rank_zero(partial(start, paper_scale=scale))
            remedy = "--arm trains one alone with it"
            options.warn_of_arm_values(recipe, names, remedy, paper_scale=scale)
            study.train_study(path, view)


def _run_experiment(name: str, path: Path, seeds: int, view: LiveView) -> None:
    try:
        _require_one_rank(name)
        view.print(EXPERIMENTS[name].run(path, seeds))
        view.print(f"table and figures: {path}")
    finally:
        release(path)


def _settings(
    recipe: Recipe, given: Mapping[str, Any], *, paper_scale: bool
) -> tuple[Settings, set[str], set[str]]:
    """The settings of a scale, changed by the arm, then by --set, then by other options.

    Returns:
        The settings; names of options that ask for a single training, not for the study; names of
        all settings that were given.
    """
    changes = options.parse_settings(given, *_NO_SETTINGS)
    settings, own = recipe.settings(paper_scale=paper_scale), changes.keys() - {"epochs"}
    if "arm" in given:
        settings, own = recipe.arm(given["arm"], settings, paper_scale=paper_scale), own | {"arm"}
    settings, set_names = options.apply_set_options(settings, given.get("set", []))
    settings, names = settings.with_changes(changes), set_names | changes.keys()
    unused = sorted(unused_in(settings) & names)
    if own and unused:  # in a study an arm may use a setting that others do not
        raise SettingError(
            f"{', '.join(unused)} has no effect with policy={settings.policy} "
            f"and optimizer={settings.optimizer}; leave it out, or choose others"
        )
    return settings, own, names


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
