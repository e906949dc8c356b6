"""The command line: train, compare, report, replay, recipes, bench."""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.exceptions import TyperException

from bigbatch.bench.commands import app as bench
from bigbatch.decide.named import POLICIES, policy_named, without_effect
from bigbatch.errors import BigbatchError, RunError, SettingError
from bigbatch.recipes import EXPERIMENTS, RECIPES, recipe_named
from bigbatch.recipes.launch import INTERRUPTED, Launch, heard_if_leading
from bigbatch.recipes.ranks import count, from_leader, leads
from bigbatch.recipes.recipe import OPTIMIZERS, Recipe
from bigbatch.recipes.study import resume as resume_at
from bigbatch.recipes.study import start_study, train_one, train_study
from bigbatch.recipes.training import Training
from bigbatch.report.figures import PICTURES, require_ending
from bigbatch.report.files import fresh_name
from bigbatch.report.live import LiveView
from bigbatch.report.metrics import history_of, seeds_of, table_of
from bigbatch.report.page import write_report
from bigbatch.report.replay import replay as replayed
from bigbatch.report.replay import save_figure, table_of_replay, time_in_words
from bigbatch.report.run_directory import RunDirectory, find_runs

app = typer.Typer(
    help="Train PyTorch models with a batch size that follows the gradient's noise.",
    epilog="Begin with: bigbatch train",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_POLICY = f"NAME:KEY=VALUE,...; NAME one of: {', '.join(POLICIES)}."
_SMOOTHING = "Samples to average noise over."
_DEAD_BAND = "Hold smaller changes: 0.1 = 10 %."
_WARM_UP = "Samples before the first change."

Paths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs or studies.")]


def main() -> None:
    """Runs the command; what goes wrong on purpose is one line and exit status 2."""
    warnings.showwarning = _one_line_warning
    launch = Launch()
    try:
        launch = Launch.join(trains=sys.argv[1:2] == ["train"])
        with heard_if_leading():
            status = app(standalone_mode=False, obj=launch) or 0
    except (BigbatchError, TyperException, OSError) as error:
        launch.tell(_line_of(error))
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        launch.tell_failure(error)
        status = 1
    except SystemExit as ending:
        launch.end(ending.code)
    if status == INTERRUPTED:  # typer returns it too
        launch.tell("interrupted")
    launch.end(status)


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="One of `bigbatch recipes` [digits].")
    ] = None,
    policy: Annotated[str | None, typer.Option(help=_POLICY)] = None,
    target: Annotated[float | None, typer.Option(help="Similarity to hold, in (-1, 1).")] = None,
    min_batch: Annotated[int | None, typer.Option(help="Least samples of a step.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most samples of a step.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Where the batch starts.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Most samples of a backward.")] = None,
    smoothing: Annotated[float | None, typer.Option(help=_SMOOTHING)] = None,
    dead_band: Annotated[float | None, typer.Option(help=_DEAD_BAND)] = None,
    warm_up: Annotated[float | None, typer.Option(help=_WARM_UP)] = None,
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
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a single training.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of the study [3].")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Data folder, where a recipe needs one.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Where fresh directories go [runs].")] = None,
    out: Annotated[Path | None, typer.Option(help="The directory itself; must be free.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run or study.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show results only.")] = False,
) -> None:
    """Trains a recipe: its whole study, or one training where a setting is given.

    The digits study, 3 seeds: [bold]bigbatch train[/]

    The same with 5 seeds: [bold]bigbatch train digits --seeds 5[/]

    One training of your own: [bold]bigbatch train digits --target 0.5 --optimizer vr-adam[/]

    Figures 1 and 3 of the VRGD paper: [bold]bigbatch train linear-regression[/]

    On two ranks: [bold]torchrun --nproc_per_node 2 -m bigbatch train digits[/]

    After an interruption: [bold]bigbatch train --resume runs/digits-1[/]
    """
    launch: Launch = context.obj
    view = LiveView(Console(), quiet=quiet)
    changes = _given(
        policy=policy,
        target=target,
        min_batch=min_batch,
        max_batch=max_batch,
        batch_size=batch_size,
        micro_batch=micro_batch,
        smoothing=smoothing,
        dead_band=dead_band,
        warm_up=warm_up,
        virtual_ranks=virtual_ranks,
        optimizer=optimizer,
        lr=lr,
        lr_scaling=lr_scaling,
        gamma=gamma,
        r_max=r_max,
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    if resume is not None:
        others = _given(recipe=recipe, epochs=epochs, seeds=seeds, data=data, runs=runs, out=out)
        _refuse_with("--resume", [*changes, *others])
        with launch.resumable(resume):
            resume_at(resume, view)
        return
    if out is not None:
        _refuse_with("--out", _given(runs=runs))
    folder = runs or Path("runs")
    if recipe in EXPERIMENTS:
        others = _given(epochs=epochs, data=data)
        _refuse_with(f"recipe {recipe}, which is one fixed experiment,", [*changes, *others])
        _require_one_rank(recipe)
        EXPERIMENTS[recipe].run(out or fresh_name(folder, recipe), seeds or 3, quiet)
        return
    chosen = recipe_named(recipe or "digits")
    _check_data(chosen, data)
    if changes:
        _refuse_with("a setting of a single training", _given(seeds=seeds))
        _train_one(chosen, {**changes, **_given(epochs=epochs)}, folder, out, launch, view)
        return
    place, begun = from_leader(
        lambda: launch.place(lambda: out or fresh_name(folder, chosen.name, launch.id))
    )
    if not begun:
        from_leader(lambda: start_study(chosen, place, seeds or 3, epochs, launch.id))
    with launch.resumable(place):
        train_study(place, view)


@app.command()
def compare(paths: Paths) -> None:
    """Shows runs and studies in one table.

    Two studies: [bold]bigbatch compare runs/digits-1 runs/digits-2[/]
    """
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    LiveView(Console()).table(table_of(histories), seeds_of(histories))


@app.command()
def report(
    paths: Paths,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A .html page, or a .png or .svg picture.")
    ] = None,
) -> None:
    """Writes the report of runs and studies side by side.

    Into the study itself: [bold]bigbatch report runs/digits-1[/]

    Two studies side by side: [bold]bigbatch report runs/digits-1 runs/digits-2 -o both.html[/]

    The curves as a picture: [bold]bigbatch report runs/digits-1 -o curves.png[/]
    """
    if out is None and len(paths) > 1:
        raise SettingError("several runs have no common place for their report; name it with -o")
    place = paths[0] / "report.html" if out is None else out
    runs = [run for path in paths for run in find_runs(path)]
    write_report(runs, place, " and ".join(path.resolve().name for path in paths))
    LiveView(Console()).say(f"report: {place}")


@app.command()
def replay(
    paths: Paths,
    policy: Annotated[list[str], typer.Option(help=_POLICY)],
    smoothing: Annotated[float | None, typer.Option(help=_SMOOTHING)] = None,
    every: Annotated[int | None, typer.Option(help="Decide after each n-th step.")] = None,
    dead_band: Annotated[float | None, typer.Option(help=_DEAD_BAND)] = None,
    largest_step: Annotated[float | None, typer.Option(help="Largest factor a decision.")] = None,
    surely: Annotated[float | None, typer.Option(help="Coverage to be sure at, 0.9 say.")] = None,
    warm_up: Annotated[float | None, typer.Option(help=_WARM_UP)] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A .png or .svg of all batch sizes.")
    ] = None,
) -> None:
    """Shows what other policies would have chosen on a finished run's log, and at what cost.

    Two of them: [bold]bigbatch replay runs/digits-1/simigrad-seed0 --policy simigrad:target=0.5
    --policy "schedule:32, x2 every 8K samples" --smoothing 2000[/]

    The log's signal and noise are taken as they are: docs/policies.md says what that leaves out.
    """
    options = _given(
        smoothing=smoothing,
        every=every,
        dead_band=dead_band,
        largest_step=largest_step,
        surely=surely,
        warm_up=warm_up,
    )
    policies = {text: policy_named(text) for text in policy}
    if out is not None:
        require_ending(out, PICTURES)
    view = LiveView(Console())
    histories = [history_of(run) for path in paths for run in find_runs(path)]
    measured = [history for history in histories if history.measured]
    for history in histories:
        if measured and not history.measured:
            view.say(f"{history.path.name}: nothing is measured yet; left out")
    found = [replayed(history, policies, **options) for history in measured or histories]
    for one in found:
        view.console.print(table_of_replay(one))
        view.say(time_in_words(one))
    if out is not None:
        save_figure(found, out)
        view.say(f"figure: {out}")


@app.command()
def recipes() -> None:
    """Lists what can be trained."""
    view = LiveView(Console())
    for recipe in RECIPES.values():
        view.say(f"{recipe.name}  {recipe.summary}")
        view.say(f"  arms: {', '.join(recipe.arms)}")
    for experiment in EXPERIMENTS.values():
        view.say(f"{experiment.name}  {experiment.summary}")


app.add_typer(bench, name="bench")


def _train_one(
    recipe: Recipe,
    changes: dict[str, Any],
    runs: Path,
    out: Path | None,
    launch: Launch,
    view: LiveView,
) -> None:
    settings = recipe.settings.changed(changes)
    _refuse_with(f"--policy {settings.policy}", changes.keys() & _unused(settings.policy))
    if not settings.optimizer.startswith("vr-"):
        _refuse_with(f"--optimizer {settings.optimizer}", changes.keys() & {"gamma", "r_max"})
    name = f"{recipe.name}-{settings.policy.partition(':')[0]}-{settings.optimizer}"
    place, begun = from_leader(
        lambda: launch.place(lambda: out or fresh_name(runs, name, launch.id))
    )
    if begun:
        with launch.resumable(place):
            resume_at(place, view)
        return
    training = Training(recipe, settings)  # before anything is written
    run = from_leader(lambda: RunDirectory.create(place, settings.as_dict(), launch.id))
    with launch.resumable(place):
        train_one(training, run, view)


def _require_one_rank(experiment: str) -> None:
    if count() > 1:
        raise SettingError(
            f"{experiment} is no training that {count()} ranks could share; run it without torchrun"
        )


def _unused(policy: str) -> set[str]:
    """Options of `train` that a policy does not listen to, or says itself."""
    unused = without_effect(policy, ("target", "min_batch", "max_batch"))
    name, _, own = policy.partition(":")
    if name in ("fixed", "schedule"):  # whatever was measured
        unused |= {"smoothing", "dead_band"} | ({"batch_size"} if own else set())
    return unused | ({"warm_up"} if name == "fixed" else set())


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse_with(what: str, given: Iterable[str]) -> None:
    names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
    if names:
        raise SettingError(f"{what} does not go together with {names}; leave them out")


def _check_data(recipe: Recipe, data: Path | None) -> None:
    if data is not None and not data.is_dir():
        raise RunError(f"there is no data folder {data}; name one that exists")
    if data is not None:
        raise SettingError(f"recipe {recipe.name!r} brings its own data; leave --data out")


def _line_of(error: Exception) -> str:
    if isinstance(error, TyperException):
        return error.format_message()
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}; name a place that can be written"
    return str(error)


def _one_line_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if leads():
        sys.stderr.write(f"bigbatch: note: {message}\n")


if __name__ == "__main__":
    main()
