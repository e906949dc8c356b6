"""`bigbatch train --dry-run`: settings with their sources, size, plans and rates; trains nothing.

It reads no data, and has no weights, no optimizer and no other ranks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bigbatch.log.history import Table, history_of
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller, controller_of
from bigbatch.policies.lr_scaling import resolve_scaling
from bigbatch.policies.plan import BatchPlan, PlanConstraints
from bigbatch.policies.policy import Fixed, TrainingState
from bigbatch.setting_types import Count, check_setting
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch_recipes.build_loop import build_controller, lr_scaling_of
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.lr_schedule import LRSchedule
from bigbatch_recipes.recipe import OURS, Recipe
from bigbatch_recipes.run_config import STUDY, read_study
from bigbatch_recipes.settings import Settings, Value
from bigbatch_recipes.validate import count_parameters, require_trainable

MOMENTS = ("start", "warmed up", "middle", "end")  # of a training, at which lr is listed
NOT_TIMED = "How long a training of the paper's scale takes was not measured."

_FEWEST_BACKWARDS = 4  # of a step; a VR optimizer compares 8
_SCHEDULE_POINTS = 1_000  # at which a schedule's smallest and largest batch are searched


@dataclass(frozen=True)
class PlanEstimate:
    """A training at one batch size."""

    plan: BatchPlan  # plan of a step over the virtual ranks
    accumulation: int  # backwards of a rank in a step
    steps: int  # approximate number of steps of all epochs
    lr: tuple[float, ...]  # learning rates at `MOMENTS`


@dataclass(frozen=True)
class DryRun:
    """Estimates of one training."""

    settings: Settings  # settings of the training
    ranks: int  # number of ranks
    samples: int  # samples of an epoch, over all ranks
    parameters: int  # number of weights; shared ones count once
    plans: Mapping[str, PlanEstimate]  # estimates at the batch sizes "start", "least" and "largest"


def dry_run(recipe: Recipe, settings: Settings, ranks: int = 1) -> DryRun:
    """Estimates one training on so many ranks.

    An epoch has the samples of the settings, else those of the paper's data.
    """
    check_setting("ranks", ranks, Count)
    require_trainable(recipe, settings)
    samples = min(settings.samples or recipe.paper_samples, recipe.paper_samples)
    constraints = _constraints(settings, ranks)
    controller = controller_of(
        build_controller(settings), constraints, batch_size=None, base_batch=None, samples=samples
    )
    bounds = controller.min_batch, controller.max_batch
    plans = {}
    for name, size in _sizes(controller, settings, samples).items():
        plan = constraints.plan(size, *bounds)
        accumulation = plan.accumulation * plan.ranks // ranks
        steps = settings.epochs * math.ceil(samples / plan.batch_size)
        rates = _rates(settings, plan.batch_size, samples)
        plans[name] = PlanEstimate(plan, accumulation, steps, rates)
    return DryRun(settings, ranks, samples, count_parameters(recipe, settings), plans)


def _constraints(settings: Settings, ranks: int) -> PlanConstraints:
    fewest = 8 if settings.optimizer.startswith("vr-") else _FEWEST_BACKWARDS
    return PlanConstraints(
        math.lcm(settings.virtual_ranks, ranks),
        settings.micro_batch,
        settings.fixed_micro_batch,
        settings.min_micro_batches or fewest,
        settings.groups,
    )


def _sizes(controller: Controller, settings: Settings, samples: int) -> dict[str, int]:
    """The first, the smallest and the largest batch size, as far as the policy fixes them."""
    policy, start = controller.policy, controller.decision.batch_size
    if isinstance(policy, Fixed):
        return {"start": start}
    least, largest = controller.min_batch, controller.max_batch or samples
    if isinstance(policy, Schedule):
        statistics = GradientStatistics(1.0, 1.0, samples=start, micro_batches=2)
        total = settings.epochs * samples
        state = TrainingState(start, start, max_batch=largest)
        sizes = []
        for seen in range(0, total, max(1, total // _SCHEDULE_POINTS)):
            position = replace(state, samples=seen, steps=seen // start, epoch=seen // samples)
            sizes.append(policy.decide(statistics, position).batch_size)
        least, largest = min(sizes), min(largest, max(sizes))
    return {"start": start, "least": least, "largest": largest}


def _rates(settings: Settings, batch: int, samples: int) -> tuple[float, ...]:
    """The learning rates at `MOMENTS`, each in the middle of a base batch."""
    schedule, base = LRSchedule(settings.lr_schedule), settings.base_batch
    lr = settings.lr * resolve_scaling(lr_scaling_of(settings), base)(batch, base, None)
    if settings.lr_schedule == "constant":
        return (lr,) * len(MOMENTS)
    total, factor = settings.epochs * samples, schedule.lr_lambda(settings.epochs, samples)
    ticks = [0, schedule.warmup(samples) // base, total // 2 // base, (total - 1) // base]
    return tuple(lr * factor((tick + 0.5) * base) for tick in ticks)


def sources(recipe: Recipe, settings: Settings) -> dict[str, tuple[Value, str]]:
    """Every setting with its source, those of the recipe first, in the recipe's order."""
    values = _values(settings)
    recipe_values = _values(recipe.settings())
    names = dict.fromkeys([*recipe.paper_scale, *recipe.small_scale, *values])
    arm = recipe.arm_tables.get(settings.arm, {})

    def source(name: str) -> str:
        if values[name] != recipe_values[name]:
            value, arm_source = arm.get(name, (None, ""))
            return f"arm {settings.arm}, {arm_source}" if value == values[name] else "given here"
        if name in recipe.small_scale and not recipe.at_paper_scale:
            return f"small scale, {OURS}"
        return recipe.paper_scale[name][1] if name in recipe.paper_scale else f"default, {OURS}"

    return {name: (values[name], source(name)) for name in names}


def _values(settings: Settings) -> dict[str, Value]:
    values = settings.as_dict()
    task: dict[str, Value] = values.pop("task")
    return {name: value for name, value in values.items() if name != "recipe"} | task


def show_dry_run(
    recipe: Recipe, settings: Settings, ranks: int | None, seeds: int, view: LiveView
) -> None:
    """Prints the settings with their sources, then sizes, plans and rates."""
    run = dry_run(recipe, settings, ranks or (recipe.paper_ranks if recipe.at_paper_scale else 1))
    rows: list[tuple[str, ...]] = [
        (name, f"{value:g}" if isinstance(value, float) else str(value), source)
        for name, (value, source) in sources(recipe, settings).items()
    ]
    view.table(Table(("setting", "value", "source"), rows), f"{recipe.name}: {recipe.summary}")
    view.table(Table(("fact", "value"), list(_facts(run))), f"source: {recipe.paper}")
    for line in _notes(recipe, run, seeds):
        view.print(line)


def show_resumption(path: Path, view: LiveView) -> None:
    """Prints how far each training of a run, a study or a sweep is, which resuming would finish."""
    names = read_study(path).trainings if (path / STUDY).exists() else None
    runs = {path.name: path} if names is None else {name: path / name for name in names}
    rows: list[tuple[str, ...]] = []
    for name, run in runs.items():
        history = history_of(run) if run.exists() else None
        if history is None or not history.rows:
            rows.append((name, "not begun", "0", "0"))
            continue
        state, last = "finished" if history.finished else "unfinished", history.rows[-1]
        rows.append((name, state, f"{last['step']:,}", f"{last['samples']:,}"))
    finished = sum(state == "finished" for _, state, *_ in rows)
    title = f"{path.name}: {finished} of {len(rows)} trainings are finished"
    view.table(Table(("training", "state", "steps", "samples"), rows), title)
    view.print("An unfinished training continues from its last checkpoint.")


def _facts(run: DryRun) -> Iterator[tuple[str, ...]]:
    yield "ranks", f"{run.ranks:,}"
    yield "samples an epoch", f"{run.samples:,}"
    yield "samples in all", f"{run.settings.epochs * run.samples:,}"
    yield "parameters", f"{run.parameters:,}"
    is_measured = run.settings.lr_scaling == "adascale"
    for name, planned in run.plans.items():
        plan, steps = planned.plan, planned.steps
        factors = f"{run.ranks} x {planned.accumulation} x {plan.micro}"
        yield f"{name}: batch", f"{plan.batch_size:,} = {factors}"
        yield f"{name}: steps", f"{steps:,}, {steps // run.settings.epochs:,} an epoch"
        exceeds_base = plan.batch_size > run.settings.base_batch
        more = " or more, as measured" if is_measured and exceeds_base else ""
        rates = {f"lr, {moment}": lr for moment, lr in zip(MOMENTS, planned.lr, strict=True)}
        if len({*planned.lr}) == 1:
            rates = {"lr": planned.lr[0]}
        for rate, lr in rates.items():
            yield f"{name}: {rate}", f"{lr:.4g}{more}"


def _notes(recipe: Recipe, run: DryRun, seeds: int) -> Iterator[str]:
    settings = run.settings
    if settings.lr_control_from:
        yield (
            "The mean r of lr_control_from is known when that run has ended; rates are without it."
        )
    if not settings.samples:
        yield f"Samples: the paper's {recipe.paper_samples:,}; a smaller data set has fewer."
    if note := LRSchedule(settings.lr_schedule).truncation_warning(settings.epochs, run.samples):
        yield note
    yield "A batch is ranks x backwards x samples; steps and rates assume that it stays constant."
    if recipe.at_paper_scale:
        yield NOT_TIMED
    else:
        minutes = recipe.minutes_of(settings)
        study = about_minutes(minutes * len(recipe.arms) * seeds)
        yield (
            f"A training takes {about_minutes(minutes)}, measured on two cores; the study of "
            f"{len(recipe.arms)} arms and {seeds} seeds {study}."
        )
    yield f"Arms of the study, each by --arm: {', '.join(recipe.arm_tables)}"


def about_minutes(minutes: float) -> str:
    """A duration in words, which a measurement on another machine gives to two digits."""
    if minutes < 1:
        return f"about {60 * minutes:.2g} seconds"
    return f"about {minutes:.2g} minutes" if minutes < 99 else f"about {minutes / 60:,.0f} hours"
