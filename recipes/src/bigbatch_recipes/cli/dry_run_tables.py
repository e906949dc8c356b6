"""`bigbatch train --dry-run`: settings, sizes, memory and rates of a training at both scales."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bigbatch_recipes.dry_run import MOMENTS, DryRun, PlanEstimate, SourcedValue, dry_run, sources
from bigbatch_recipes.lr_schedule import LRSchedule
from bigbatch_recipes.recipe import SEEDS, Recipe
from bigbatch_recipes.settings import Settings

UNKNOWN = "not known"  # where shapes depend on the data
NOT_TIMED = "How long a training of the paper's scale takes was not measured."

_SCALES = {False: "small", True: "paper"}

Rows = dict[str, str]


def show_dry_run(
    recipe: Recipe, settings: Mapping[bool, Settings], ranks: int | None, console: Console
) -> None:
    """Prints settings with their sources, sizes, plans and rates.

    Args:
        recipe: the recipe.
        settings: settings by scale; True is the paper's.
        ranks: number of ranks; None for 1 at the small scale, and the paper's at the paper's.
        console: the console to print to.
    """
    runs = {
        paper_scale: dry_run(recipe, each, ranks or (recipe.paper_ranks if paper_scale else 1))
        for paper_scale, each in settings.items()
    }
    values: dict[bool, Rows] = {}
    for paper_scale, each in sorted(settings.items()):
        sourced = sources(recipe, each, paper_scale=paper_scale)
        values[paper_scale] = {name: _value_text(one) for name, one in sourced.items()}
        value_sources = {name: one.source for name, one in sourced.items()}  # of the last scale
    console.print(f"{recipe.name}: {recipe.summary} ({recipe.paper})")
    console.print(_table("setting", values, value_sources))
    console.print(_table("fact", {scale: facts(run) for scale, run in runs.items()}))
    for line in _notes(recipe, settings, runs):
        console.print(line)


def facts(run: DryRun) -> Rows:
    """Sizes, memory, batches and rates of a dry run, by name."""
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
        **{f"memory: {name}": format_bytes(size) for name, size in sizes.items() if size},
        "memory: its activations": UNKNOWN if acts is None else format_bytes(acts),
        "memory: in all": UNKNOWN if acts is None else format_bytes(sum(sizes.values()) + acts),
        "operations a sample": UNKNOWN if memory.flops is None else f"{memory.flops:.3g}",
        "inputs of the model, an epoch": format_bytes(memory.sample * run.samples),
        **{
            f"{name}: {fact}": value
            for name, planned in run.plans.items()
            for fact, value in _plan_facts(planned, run).items()
        },
    }


def format_bytes(size: int) -> str:
    """A number of bytes with three digits and a decimal unit."""
    return format_amount(size, (" bytes", " KB", " MB", " GB", " TB"))


def format_amount(amount: float, units: Sequence[str]) -> str:
    """A number with three digits and the largest unit that it reaches, in steps of 1,000."""
    unit, *larger_units = units
    for larger in larger_units:
        if amount >= 999.5:
            amount, unit = amount / 1000, larger
    return f"{amount:.3g}{unit}" if amount < 999.5 else f"{amount:,.0f}{unit}"


def about_minutes(minutes: float) -> str:
    """A duration in words, which a measurement on another machine gives to two digits."""
    if minutes < 1:
        return f"about {60 * minutes:.2g} seconds"
    return f"about {minutes:.2g} minutes" if minutes < 99 else f"about {minutes / 60:,.0f} hours"


def _plan_facts(planned: PlanEstimate, run: DryRun) -> Rows:
    plan = planned.plan
    rates = {f", {moment}": lr for moment, lr in zip(MOMENTS, planned.lr, strict=True)}
    if len({*planned.lr}) == 1:
        rates = {"": planned.lr[0]}
    measured = run.settings.lr_scaling == "adascale"
    more = " or more, as measured" if measured and plan.batch_size > run.settings.base_batch else ""
    return {
        "batch": f"{plan.batch_size:,} = {run.ranks} x {planned.accumulation} x {plan.micro}",
        "steps": f"{planned.steps:,}, {planned.steps // run.settings.epochs:,} an epoch",
        **{f"lr{moment}": f"{lr:.4g}{more}" for moment, lr in rates.items()},
        **({"sent by a rank a step": format_bytes(planned.bytes_sent)} if run.ranks > 1 else {}),
    }


def _table(header: str, by_scale: Mapping[bool, Rows], sources: Rows | None = None) -> Table:
    """One row per name, one column per scale, and a column of sources where they are given."""
    columns = [_SCALES[paper_scale] for paper_scale in by_scale]
    table = Table(header, *columns, box=SIMPLE_HEAD, pad_edge=False)
    if sources is not None:
        table.add_column("source")
    for column in table.columns:
        column.overflow = "fold"
    for name in dict.fromkeys(name for rows in by_scale.values() for name in rows):
        cells = [rows.get(name, "-") for rows in by_scale.values()]
        table.add_row(name, *cells, *([] if sources is None else [sources[name]]))
    return table


def _value_text(one: SourcedValue) -> str:
    text = f"{one.value:g}" if isinstance(one.value, float) else str(one.value)
    return f"{text} *" if one.source.startswith("small scale") else text


def _notes(
    recipe: Recipe, settings: Mapping[bool, Settings], runs: Mapping[bool, DryRun]
) -> list[str]:
    """Notes on the numbers."""
    conditions: dict[str, Callable[[Settings], bool]] = {
        "VR under DDP shards its average of r over the ranks, so it takes less than shown.": (
            lambda one: one.optimizer in ("vr-adam", "vr-lamb")
        ),
        "The mean r of lr_control_from is known when that run has ended; rates are without it.": (
            lambda one: bool(one.lr_control_from)
        ),
        "DeepSpeed shards state (zero_stage 1) and gradients (2) over the ranks; here they are not "
        "sharded, and bytes sent are those of DDP.": lambda one: one.engine == "deepspeed",
    }
    lines = ["* of the small scale, ours." for paper_scale in settings if not paper_scale]
    lines += [line for line, holds in conditions.items() if any(map(holds, settings.values()))]
    if any(run.memory.sums[0] for run in runs.values()):
        lines.append(
            "VR on one process has its own sum of gradients in its first step; the second frees it "
            "and keeps the sum in .grad, unless clip or float16 write to .grad."
        )
    for run in runs.values():
        note = LRSchedule(run.settings.lr_schedule).truncation_warning(
            run.settings.epochs, run.samples
        )
        lines += [note] * bool(note and note not in lines)
    if not all(one.samples for one in settings.values()):
        lines.append(
            f"Samples: the paper's {recipe.paper_samples:,} unless the settings limit them; a "
            "smaller data set has fewer."
        )
    lines += [
        "A batch is ranks x backwards x samples; steps and rates assume that it stays constant.",
        "Activations are those of a CPU's kernels in one forward; operations are matrix products "
        "and convolutions, forward and backward; other memory of a device is not counted.",
    ]
    if UNKNOWN in {value for run in runs.values() for value in facts(run).values()}:
        lines.append(f"{UNKNOWN}: shapes in the loss depend on the data.")
    if (small := settings.get(False)) is not None:
        minutes = recipe.minutes_of(small)
        study = minutes * len(recipe.arms) * SEEDS
        lines.append(
            f"Small scale: a training takes {about_minutes(minutes)}, measured on two cores; the "
            f"study of {len(recipe.arms)} arms and {SEEDS} seeds {about_minutes(study)}."
        )
    lines.append(NOT_TIMED)
    return [*lines, f"Arms of the study, each by --arm: {', '.join(recipe.arms)}"]
