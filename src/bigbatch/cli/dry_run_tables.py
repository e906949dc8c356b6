"""`bigbatch train --dry-run`: what a training would take, at both scales side by side."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bigbatch.experiments.dry_run import (
    MOMENTS,
    DryRun,
    PlanEstimate,
    SourcedValue,
    dry_run,
    sources,
)
from bigbatch.experiments.lr_schedule import LRSchedule
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import Settings

UNKNOWN = "not known"  # where shapes depend on the data

Rows = dict[str, str]


def show_dry_run(
    recipe: Recipe, settings: Mapping[bool, Settings], ranks: int | None, console: Console
) -> None:
    """Prints settings with their sources, sizes, plans and rates; writes nothing.

    Args:
        recipe: what would be trained.
        settings: of the scales to show; True is the full one.
        ranks: how many; None for one at the small scale, and the paper's at the full one.
        console: where to.
    """
    runs = {
        paper_scale: dry_run(recipe, asked, ranks or (recipe.paper_ranks if paper_scale else 1))
        for paper_scale, asked in settings.items()
    }
    stated = {
        paper_scale: sources(recipe, asked, paper_scale=paper_scale)
        for paper_scale, asked in settings.items()
    }
    title = f"{recipe.name}: {recipe.summary} ({recipe.paper})"
    console.print(title)
    console.print(_settings_table(stated))
    console.print(_facts_table({paper_scale: facts(run) for paper_scale, run in runs.items()}))
    for line in _notes(recipe, settings, runs):
        console.print(line)


def facts(run: DryRun) -> Rows:
    """What a dry run has found, by name."""
    memory = run.memory
    sizes = {
        "parameters, buffers": memory.weights,
        "gradients": memory.gradients,
        "DDP's buckets": memory.gradients if run.ranks > 1 else 0,
        "optimizer state": memory.state,
        "second moment of VR": memory.second_moment,
        f"VR's own sum, {'every' if memory.sums[1] else 'first'} step": memory.sums[0],
        "a micro-batch": memory.sample * run.settings.micro_batch,
    }
    acts = memory.activations
    total = run.settings.epochs * run.samples
    return {
        "ranks": f"{run.ranks:,}",
        "samples an epoch": f"{run.samples:,}",
        "samples in all": f"{total:,}",
        "parameters": f"{memory.parameters:,}",
        **{f"memory: {name}": in_bytes(size) for name, size in sizes.items() if size},
        "memory: its activations": UNKNOWN if acts is None else in_bytes(acts),
        "memory: in all": UNKNOWN if acts is None else in_bytes(sum(sizes.values()) + acts),
        "operations a sample": UNKNOWN if memory.flops is None else f"{memory.flops:.3g}",
        "inputs of the model, an epoch": in_bytes(memory.sample * run.samples),
        **{
            f"{name}: {fact}": value
            for name, planned in run.plans.items()
            for fact, value in _of_plan(planned, run).items()
        },
    }


def in_bytes(size: int) -> str:
    """A number of bytes in the unit that fits, of 1,000s."""
    amount, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if amount >= 999.5:
            amount, unit = amount / 1000, larger
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:,.0f} {unit}"


def _of_plan(planned: PlanEstimate, run: DryRun) -> Rows:
    plan = planned.plan
    rates = dict(zip(MOMENTS, planned.lr, strict=True))
    steady = all(before == after for before, after in pairwise(planned.lr))
    shown = {"": planned.lr[0]} if steady else {f", {when}": lr for when, lr in rates.items()}
    measured = run.settings.lr_scaling == "adascale"
    more = " or more, as measured" if measured and plan.batch_size > run.settings.base_batch else ""
    return {
        "batch": f"{plan.batch_size:,} = {run.ranks} x {planned.accumulation} x {plan.micro}",
        "steps": f"{planned.steps:,}, {planned.steps // run.settings.epochs:,} an epoch",
        **{f"lr{when}": f"{lr:.4g}{more}" for when, lr in shown.items()},
        **({"sent by a rank a step": in_bytes(planned.bytes_sent)} if run.ranks > 1 else {}),
    }


def _settings_table(stated: Mapping[bool, Mapping[str, SourcedValue]]) -> Table:
    """By name; where both scales are there, the source is that of the full one."""
    table = _table(*(_SCALES[paper_scale] for paper_scale in stated), "source", first="setting")
    names = dict.fromkeys(name for listed in stated.values() for name in listed)
    last = stated[max(stated)]
    for name in names:
        values = [_marked(listed[name]) for listed in stated.values()]
        table.add_row(name, *values, last[name].source)
    return table


def _facts_table(found: Mapping[bool, Rows]) -> Table:
    table = _table(*(_SCALES[paper_scale] for paper_scale in found), first="fact")
    names = dict.fromkeys(name for rows in found.values() for name in rows)
    for name in names:
        table.add_row(name, *(rows.get(name, "-") for rows in found.values()))
    return table


def _table(*columns: str, first: str) -> Table:
    table = Table(first, *columns, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _marked(one: SourcedValue) -> str:
    shown = f"{one.value:g}" if isinstance(one.value, float) else str(one.value)
    return f"{shown} *" if one.source.startswith("small scale") else shown


def _notes(
    recipe: Recipe, settings: Mapping[bool, Settings], runs: Mapping[bool, DryRun]
) -> list[str]:
    """What has to be known of the numbers."""
    holds: dict[str, Callable[[Settings], bool]] = {
        "VR under DDP spreads its average of r over the ranks: less than is said of the state.": (
            lambda one: one.optimizer in ("vr-adam", "vr-lamb")
        ),
        "The mean r of lr_control_from is known when that run has ended; rates are without it.": (
            lambda one: bool(one.lr_control_from)
        ),
        "DeepSpeed spreads state (zero_stage 1) and gradients (2) over the ranks; here they are "
        "whole, and what is sent is as by DDP.": lambda one: one.engine == "deepspeed",
    }
    lines = ["* of the small scale, ours." for paper_scale in settings if not paper_scale]
    lines += [line for line, is_so in holds.items() if any(map(is_so, settings.values()))]
    if any(run.memory.sums[0] for run in runs.values()):
        lines.append(
            "VR on one process sums gradients by itself in its first step; the next one frees "
            "that, and .grad holds the sum, but where clip or float16 write to .grad."
        )
    lines += dict.fromkeys(note for run in runs.values() if (note := _note_of_schedule(run)))
    if not all(one.samples for one in settings.values()):
        lines.append(
            f"Samples: the paper's {recipe.paper_samples:,}, where the settings say none; a data "
            "set of fewer has fewer."
        )
    lines += [
        "A batch is ranks x backwards x samples; steps and rates are of a batch that stays there.",
        "Activations are those of a CPU's kernels, and of one forward; operations are matrix "
        "products and convolutions, forward and backward; nothing else on a device is counted.",
    ]
    if UNKNOWN in {value for run in runs.values() for value in facts(run).values()}:
        lines.append(f"{UNKNOWN}: shapes in the loss depend on the data.")
    arms = ", ".join(recipe.arms)
    return [*lines, f"Arms of the study, each by --arm: {arms}"]


def _note_of_schedule(run: DryRun) -> str:
    """What a training would say of its own."""
    return LRSchedule(run.settings.lr_schedule).truncation_warning(run.settings.epochs, run.samples)


_SCALES = {False: "small", True: "paper"}
