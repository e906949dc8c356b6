"""Estimates of a training from its settings alone, without data, weights or other ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from bigbatch.optim.micro_batch_optimizer import micro_batch_optimizer
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.lr_scaling import resolve_scaling
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import Fixed, TrainingState
from bigbatch.setting_types import Count, check_setting
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.build_loop import build_loop, lr_scaling_of
from bigbatch_recipes.build_optimizer import build_controller, build_optimizer
from bigbatch_recipes.lr_schedule import LRSchedule
from bigbatch_recipes.memory_estimate import MemoryEstimate, estimate_memory
from bigbatch_recipes.recipe import OURS, Data, Recipe
from bigbatch_recipes.settings import Settings, Value
from bigbatch_recipes.validate import require_trainable

_DEEPSPEED_BACKWARDS = 8  # of a rank and step, which VR compares on DeepSpeed
_SCHEDULE_POINTS = 1_000  # at which a schedule's smallest and largest batch are searched

MOMENTS = ("start", "warmed up", "middle", "end")  # of a training, at which lr is listed


@dataclass(frozen=True)
class SourcedValue:
    """A setting and the source of its value.

    Args:
        value: the value of the setting.
        source: the paper or code it is from, or what changed the paper's value.
    """

    value: Value
    source: str


@dataclass(frozen=True)
class PlanEstimate:
    """A training at one batch size.

    Args:
        plan: plan of a step over the virtual ranks.
        accumulation: backwards of a rank in a step.
        steps: approximate number of steps of all epochs.
        lr: learning rates at `MOMENTS`.
        bytes_sent: bytes that a rank sends in a step for its gradients, by ring all-reduces; see
            `bytes_sent_per_step`.
    """

    plan: BatchPlan
    accumulation: int
    steps: int
    lr: tuple[float, ...]
    bytes_sent: int


@dataclass(frozen=True)
class DryRun:
    """Estimates of one training.

    Args:
        settings: settings of the training.
        ranks: number of ranks.
        samples: samples of an epoch, over all ranks.
        memory: memory and operations of a rank.
        plans: estimates at the batch sizes "start", "least" and "largest".
    """

    settings: Settings
    ranks: int
    samples: int
    memory: MemoryEstimate
    plans: Mapping[str, PlanEstimate]


def dry_run(recipe: Recipe, settings: Settings, ranks: int = 1) -> DryRun:
    """Estimates one training on so many ranks.

    An epoch has the samples of the settings, else those of the paper's data.

    Raises:
        SettingError: the settings are invalid, as a training would report.
    """
    check_setting("ranks", ranks, Count)
    require_trainable(recipe, settings)
    samples = min(settings.samples or recipe.paper_samples, recipe.paper_samples)
    memory = estimate_memory(recipe, settings, ranks)
    loop = _loop(recipe, settings, samples, ranks)
    plans = {
        name: _estimate_plan(settings, loop.planned(size), memory, samples, ranks)
        for name, size in _sizes(loop, settings, samples).items()
    }
    return DryRun(settings, ranks, samples, memory, plans)


def sources(recipe: Recipe, settings: Settings, *, paper_scale: bool) -> dict[str, SourcedValue]:
    """Every setting with its source, those of the recipe first, in the recipe's order."""
    values = _values(settings)
    recipe_values = _values(recipe.settings(paper_scale=paper_scale))
    names = dict.fromkeys([*recipe.paper_scale, *recipe.small_scale, *values])
    arm = recipe.arm_tables(paper_scale=paper_scale).get(settings.arm, {})

    def source(name: str) -> str:
        if values[name] != recipe_values[name]:
            value, arm_source = arm.get(name, (None, ""))
            return f"arm {settings.arm}, {arm_source}" if value == values[name] else "given here"
        if name in recipe.small_scale and not paper_scale:
            return f"small scale, {OURS}"
        return recipe.paper_scale[name][1] if name in recipe.paper_scale else f"default, {OURS}"

    return {name: SourcedValue(values[name], source(name)) for name in names}


def bytes_sent_per_step(gradients: int, m2: int, ranks: int, *, accumulated: bool) -> int:
    """Bytes that a rank sends in a step under DDP, without sums of a few bytes a layer or rank.

        2 (W - 1) / W gradients     a ring all-reduce; the shards that VR exchanges take the same
        (W - 1) / W M2              in addition with VR, if a rank has several micro-batches

    Source:
        docs/scaling.md.
    """
    return round((ranks - 1) / ranks * (2 * gradients + (m2 if accumulated else 0)))


def _values(settings: Settings) -> dict[str, Value]:
    """The values of all settings by name, those of `task` included."""
    values = settings.as_dict()
    task: dict[str, Value] = values.pop("task")
    return {name: value for name, value in values.items() if name != "recipe"} | task


def _loop(recipe: Recipe, settings: Settings, samples: int, ranks: int) -> AdaptiveBatch:
    """A real loop over numbers in place of samples, with a model of one weight."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(settings, model.named_parameters())
    data = Data(range(samples), lambda _: {})  # type: ignore[arg-type]
    settings = settings.with_changes({"workers": 0})
    virtual_ranks = math.lcm(settings.virtual_ranks, ranks)
    compares = settings.engine == "deepspeed" and micro_batch_optimizer(optimizer) is not None
    if compares and settings.min_micro_batches is None:
        settings = settings.with_changes({"min_micro_batches": _DEEPSPEED_BACKWARDS * ranks})
    controller = build_controller(settings)
    return build_loop(data, settings, model, optimizer, controller, virtual_ranks)


def _sizes(loop: AdaptiveBatch, settings: Settings, samples: int) -> dict[str, int]:
    """The first, the smallest and the largest batch size, as far as the policy fixes them."""
    policy, start = loop.controller.policy, loop.controller.decision.batch_size
    if isinstance(policy, Fixed):
        return {"start": start}
    least, largest = loop.controller.min_batch, loop.controller.max_batch or samples
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


def _estimate_plan(
    settings: Settings, plan: BatchPlan, memory: MemoryEstimate, samples: int, ranks: int
) -> PlanEstimate:
    batch = plan.batch_size
    accumulation = plan.accumulation * plan.ranks // ranks
    return PlanEstimate(
        plan,
        accumulation,
        settings.epochs * math.ceil(samples / batch),
        _rates(settings, batch, samples),
        bytes_sent_per_step(memory.gradients, memory.m2_sent, ranks, accumulated=accumulation > 1),
    )


def _rates(settings: Settings, batch: int, samples: int) -> tuple[float, ...]:
    """The learning rates at `MOMENTS`, each in the middle of a base batch."""
    schedule, base = LRSchedule(settings.lr_schedule), settings.base_batch
    lr = settings.lr * resolve_scaling(lr_scaling_of(settings), base)(batch, base, None)
    if settings.lr_schedule == "constant":
        return (lr,) * len(MOMENTS)
    total, factor = settings.epochs * samples, schedule.lr_lambda(settings.epochs, samples)
    ticks = [0, schedule.warmup(samples) // base, total // 2 // base, (total - 1) // base]
    return tuple(lr * factor((tick + 0.5) * base) for tick in ticks)
