"""`bigbatch bench`: one command for each benchmark."""

import os
from collections.abc import Iterable
from itertools import tee
from pathlib import Path
from typing import Annotated

import torch
import typer
from bigbatch.log.curves import FIGURE_FORMATS, require_writable
from rich import box
from rich.progress import track
from rich.table import Table

from bigbatch_recipes.console import plain_console
from studies import (
    advice_overhead,
    advice_results,
    advice_sweep,
    advice_verdict,
    batch_tracking,
    coverage,
    decision_regret,
    engine_cost,
    known_answers,
    loop_cost,
    loop_overhead,
    meter_cost,
    optimizer_cost,
    projection_accuracy,
    scaling,
    shakespeare_gpt,
    similarity_accuracy,
    step_kinds,
    trainer_cost,
    vr_vs_base,
)
from studies.advice_workloads import WORKLOADS
from studies.known_answer import KnownAnswer
from studies.noisy_quadratic import RATES
from studies.timing import Row

_WIDTH = 200  # columns of a table in a file

_COSTS = "Costs, as ratios"
_DECISIONS = "Decisions and optimizers"
_ACCURACY = "Accuracy of what is measured"

bench = typer.Typer(
    help="Measures costs and accuracy on this machine.", add_completion=False, rich_markup_mode=None
)

Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each ratio.")]
Trials = Annotated[int, typer.Option(min=2, help="Random steps for each row.")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Data = Annotated[
    Path | None,
    typer.Option(exists=True, help="Folder with fashion-mnist/, for gradients of a real network."),
]

Out = Annotated[
    Path | None,
    typer.Option(help="Figure to draw, .png or .svg; replaces only what bigbatch wrote."),
]


@bench.command("measure", rich_help_panel=_COSTS)
def measure_(
    rounds: Rounds = 7,
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu",
) -> None:
    """Each measured quantity, per step, by network.

    Steps with similarity, interval and second moment, by micro-batch.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"torch sees no GPU here, so --device {device} cannot be timed")
    shapes = meter_cost.SHAPES
    costs = (cost for shape in shapes for cost in meter_cost.shape_costs(shape, rounds, device))
    title = f"a step with / without; median of {rounds} interleaved rounds"
    _show(title, (cost.row() for cost in costs), total=4 * len(shapes))
    total = len(meter_cost.METER_OPTIONS)
    _show("memory and bytes sent", meter_cost.memory_and_bytes_sent(), total=total)


@bench.command("optim", rich_help_panel=_COSTS)
def optim(
    rounds: Rounds = 7,
    over: Annotated[
        list[str] | None,
        typer.Option(help=f"Parameter lists: {'; '.join(optimizer_cost.PARAMETER_LISTS)} [all]."),
    ] = None,
) -> None:
    """Optimizer steps, over bytes and base optimizers.

    Over the bytes that must move, and over the step of the base optimizer.
    """
    names = list(optimizer_cost.PARAMETER_LISTS)
    for name in over or ():
        if name not in names:
            raise typer.BadParameter(f"--over {name!r}: one of {', '.join(names)}")
    implementation = optimizer_cost.implementation()
    title = f"{implementation}; median [least, most] of {rounds} interleaved rounds"
    lists = over or names
    teams = [(name, team) for name in lists for team in optimizer_cost.teams()]
    rows = (row for name, team in teams for row in optimizer_cost.step_costs(name, team, rounds))
    _show(title, rows, total=sum(len(team) for _, team in teams))
    _show(title, optimizer_cost.moment_costs(rounds), total=3)
    _show("median of 3 rounds", [optimizer_cost.import_cost(rounds=3).row()])


@bench.command("loop", rich_help_panel=_COSTS)
def loop_(rounds: Rounds = 15) -> None:
    """The adaptive loop: time, Python, copies, samples.

    Over a plain loop: time, time in Python, copies, samples that wait.
    """
    title = f"median of {rounds} interleaved rounds"
    _show(title, loop_cost.costs(rounds), total=loop_cost.ROWS)


@bench.command("overhead", rich_help_panel=_COSTS)
def overhead(
    rounds: Rounds = 5,
    over: Annotated[
        list[str] | None, typer.Option(help=f"Networks: {'; '.join(loop_overhead.NETWORKS)} [all].")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=4, help=f"Batch sizes [{', '.join(map(str, loop_overhead.BATCHES))}]."),
    ] = None,
) -> None:
    """The adaptive loop over one backward a step.

    By network and batch size; the plain loop has one backward a step.
    """
    names, batches = _networks(over), batch or loop_overhead.BATCHES
    title = f"step / plain step of one backward; all rounds [least, most of {rounds}]"
    rows = loop_overhead.rows(names, batches, rounds)
    _show(title, rows, total=len(names) * len(batches))


def _networks(over: list[str] | None) -> list[str]:
    names = list(loop_overhead.NETWORKS)
    for name in over or ():
        if name not in names:
            raise typer.BadParameter(f"--over {name!r}: one of {'; '.join(names)}")
    return over or names


@bench.command("advice-overhead", rich_help_panel=_COSTS)
def advice_overhead_(
    rounds: Rounds = 5,
    over: Annotated[
        list[str] | None, typer.Option(help=f"Networks: {'; '.join(loop_overhead.NETWORKS)} [all].")
    ] = None,
    batch: Annotated[int, typer.Option(min=8, help="Samples of a step.")] = 32,
) -> None:
    """Being observed by `bigbatch advise`.

    Without the start of the program.
    """
    names = _networks(over)
    title = f"observed step / plain step; all rounds [least, most of {rounds}]"
    _show(title, advice_overhead.rows(names, batch, rounds), total=len(names))


@bench.command("decisions", rich_help_panel=_DECISIONS)
def decisions(
    rate: Annotated[
        list[str] | None, typer.Option(help=f"Learning rates: {', '.join(RATES)} [all].")
    ] = None,
    beds: Annotated[int | None, typer.Option(min=1, help="Beds of each rate [10].")] = None,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Trainings of each policy.")
    ] = decision_regret.SEEDS,
    out: Out = None,
) -> None:
    """Each policy against the best schedule, on quadratics.

    How much longer a policy takes to the same loss, on noisy quadratics.
    """
    if out is not None:
        require_writable(out, FIGURE_FORMATS)
    rates = [known for known in RATES if rate is None or known in rate]
    for name in rate or ():
        if name not in RATES:
            raise typer.BadParameter(f"--rate {name!r}: one of {', '.join(RATES)}")
    tracked = (one.row() for one in batch_tracking.run(seed))
    _show("the controller's batch against that of the true noise scale", tracked)
    regrets = list(decision_regret.run(rates, seed, seeds, beds))
    title = f"over the best schedule; median of {seeds} seeds"
    _show(title, (one.row() for one in regrets))
    _show(f"{title}, and over beds", decision_regret.summary(regrets))
    if out is not None:
        decision_regret.draw(regrets, out)


@bench.command("advice", rich_help_panel=_DECISIONS)
def advice_(
    workloads: Annotated[str, typer.Option(help="Names with commas between them.")] = ",".join(
        WORKLOADS
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="JSON of all results; a file that is there is continued."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, help="JSON to show again; nothing is trained."),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two sizes, one rate, one seed: a smoke test.")
    ] = False,
) -> None:
    """Advised batch sizes against the best, on trainings.

    Whether an advised batch size costs at most 15 % more than the best, on five trainings.
    """
    if source is not None:
        _show_verdicts(advice_results.read_results(source)[1])
        return
    names = workloads.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise typer.BadParameter(f"--workloads {name!r}: one of {', '.join(WORKLOADS)}")
    plan = advice_sweep.QUICK if quick else advice_sweep.Plan()
    about, results = advice_sweep.begin(names, plan, out)
    console = plain_console(stderr=True)
    for line in advice_sweep.run({name: results[name] for name in names}, plan, jobs):
        console.print(line)
        if out is not None:
            advice_results.write_results(out, about, results)
    _show_verdicts(results)


def _show_verdicts(results: advice_results.Results) -> None:
    """The table by both clocks, and how many workloads pass."""
    for clock, seconds in advice_verdict.CLOCKS.items():
        judged = list(advice_verdict.verdicts(results.values(), clock))
        if judged:
            _show(f"cost in {seconds}; ± standard error", (one.row() for one in judged))
            typer.echo(advice_verdict.conclusion(judged))


@bench.command("engines", rich_help_panel=_COSTS)
def engines_(
    rounds: Rounds = 5,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, max=4, help="Numbers of ranks: 2, 3, 4 [all].")
    ] = None,
) -> None:
    """Bytes that ranks send, and step times, by engine.

    DDP, FSDP2 and DeepSpeed; bytes are counted, and by formula.
    """
    counts = ranks or engine_cost.RANKS
    total = sum(len(step_kinds.kinds(engine, n)) for n in counts for engine in step_kinds.ENGINES)
    title = f"gloo, ranks share {os.cpu_count()} cores; median [least, most] of {rounds} rounds"
    _show(title, engine_cost.costs(rounds, counts), total=total)
    _show(scaling.TITLE, scaling.rows(), total=scaling.ROWS)
    title = f"one process; median [least, most] of {rounds} rounds"
    _show(title, trainer_cost.costs(rounds), total=trainer_cost.ROWS)


@bench.command("vr-vs-base", rich_help_panel=_DECISIONS)
def vr_vs_base_(
    seeds: Annotated[int, typer.Option(min=2, help="Trainings of each optimizer.")] = 3,
) -> None:
    """VR optimizers against their bases, on the digits.

    Each at its best learning rate.
    """
    title = f"digits, batch 512, k = 8, 25 epochs; mean ± standard deviation over {seeds} seeds"
    rows = (outcome.row() for outcome in vr_vs_base.run(seeds))
    _show(title, rows, total=3 * len(vr_vs_base.GRIDS) + 1)


@bench.command("coverage", rich_help_panel=_ACCURACY)
def coverage_(trials: Trials = coverage.TRIALS, seed: Seed = 0, data: Data = None) -> None:
    """How often confidence intervals contain the truth.

    Intervals of several levels, where the truth is known.
    """
    rows = (one.row() for one in coverage.run(seed, trials, data))
    _show(f"coverage of intervals, {trials} trials", rows)


@bench.command("known-answers", rich_help_panel=_ACCURACY)
def known_answers_(
    seed: Seed = 0,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, help="Folder with fashion-mnist/ and tinyshakespeare/."),
    ] = None,
    *,
    paper_scale: Annotated[
        bool, typer.Option("--paper-scale", help="Train the GPT with all 250 steps of 64 windows.")
    ] = False,
) -> None:
    """Published and analytic numbers; fails if one differs.

    Against what this library computes.
    """
    phases = shakespeare_gpt.FULL if paper_scale else shakespeare_gpt.SHORT
    answers, shown = tee(known_answers.run(seed, data, phases))
    _show("known answers", (answer.row() for answer in shown), width=2 * _WIDTH)
    require_passes(answers)


@bench.command("projection-accuracy", rich_help_panel=_ACCURACY)
def projection_accuracy_(
    seeds: Annotated[int, typer.Option(min=1, help="Trainings.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each.")] = projection_accuracy.STEPS,
) -> None:
    """Random projections against exact gradients.

    Noise and similarity of groups of samples.
    """
    _show("8 groups of one backward of 64 samples, digits", projection_accuracy.run(seeds, steps))


@bench.command("similarity-accuracy", rich_help_panel=_ACCURACY)
def similarity_accuracy_(
    trials: Trials = similarity_accuracy.TRIALS, seed: Seed = 0, data: Data = None, out: Out = None
) -> None:
    """Our similarity and SimiGrad's cosine against the truth.

    Of the same steps.
    """
    if out is not None:
        require_writable(out, FIGURE_FORMATS)
    comparisons, shown = tee(similarity_accuracy.run(seed, trials, data))
    _show("two estimates", (one.row() for one in shown))
    if out is not None:
        similarity_accuracy.draw(list(comparisons), out)


def require_passes(answers: Iterable[KnownAnswer]) -> None:
    """Names the answers that are wrong, and exits with 1 if there are any."""
    failures = [answer.what for answer in answers if not answer.passes]
    if failures:
        typer.echo(f"{len(failures)} failed: {'; '.join(failures)}", err=True)
        raise typer.Exit(1)


def _show(title: str, rows: Iterable[Row], total: int | None = None, width: int = _WIDTH) -> None:
    """Shows progress, then the table; as Markdown where the output is no terminal."""
    console = plain_console()
    markdown = not console.is_terminal
    if markdown:
        console = plain_console(width=width)
    console.print(title)
    tracked = list(track(rows, "measuring", total=total, console=plain_console(stderr=True)))
    table = Table(*tracked[0], box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for row in tracked:
        table.add_row(*row.values())
    console.print(table)
