"""What a training would take, from its settings alone: no data, no weights, no other rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from bigbatch.experiments.build_loop import loop_over
from bigbatch.experiments.build_optimizer import build_optimizer
from bigbatch.experiments.lr_schedule import LRSchedule
from bigbatch.experiments.memory_estimate import MemoryEstimate, footprint
from bigbatch.experiments.recipe import OURS, Data, Recipe
from bigbatch.experiments.settings import Settings, Value
from bigbatch.experiments.validate import require_trainable
from bigbatch.optim.micro_batch_optimizer import micro_batch_optimizer
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import Fixed, TrainingState
from bigbatch.setting_types import Count, check_setting
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.lr_scaling import resolve_scaling

_JOINED = 8  # backwards of a rank, each joined with the others', that VR compares on DeepSpeed
_PLACES = 1_000  # of a schedule that are looked at for its least and largest batch

MOMENTS = ("start", "warmed up", "middle", "end")  # of a training, for its learning rates


@dataclass(frozen=True)
class Stated:
    """A setting, and whose number it is.

    Args:
        value: that is used.
        source: of the value, or what changed the paper's.
    """

    value: Value
    source: str


@dataclass(frozen=True)
class Planned:
    """A training whose batch stayed at one size.

    Args:
        plan: of a step, among the virtual ranks.
        accumulation: backwards of a rank.
        steps: of all epochs, about.
        lr: at `MOMENTS`.
        sent: bytes that a rank sends in a step for its gradients, by rings; `sent` has the rule.
    """

    plan: BatchPlan
    accumulation: int
    steps: int
    lr: tuple[float, ...]
    sent: int


@dataclass(frozen=True)
class DryRun:
    """Of one training.

    Args:
        settings: with which.
        ranks: how many.
        samples: of an epoch, over all ranks.
        keeps: what a rank keeps, and computes.
        plans: where the batch starts, at its least and at its largest, by these names.
    """

    settings: Settings
    ranks: int
    samples: int
    keeps: MemoryEstimate
    plans: Mapping[str, Planned]


def dry_run(recipe: Recipe, settings: Settings, ranks: int = 1) -> DryRun:
    """What one training would take on so many ranks.

    An epoch has the samples of the settings, else those of the paper's data.

    Raises:
        SettingError: the settings cannot work, as a training would say.
    """
    check_setting("ranks", ranks, Count)
    require_trainable(recipe, settings)
    samples = min(settings.samples or recipe.paper_samples, recipe.paper_samples)
    keeps = footprint(recipe, settings, ranks)
    loop = _loop(recipe, settings, samples, ranks)
    plans = {
        name: _planned(settings, loop.planned(size), keeps, samples, ranks)
        for name, size in _sizes(loop, settings, samples).items()
    }
    return DryRun(settings, ranks, samples, keeps, plans)


def sources(recipe: Recipe, settings: Settings, *, paper_scale: bool) -> dict[str, Stated]:
    """Every setting with its source, those of the recipe first, in the recipe's order."""
    scale, values = recipe.settings(paper_scale=paper_scale), _values(settings)
    listed = [*recipe.paper_scale, *recipe.small, *values]
    before, arm = _values(scale), recipe.arm_tables(paper_scale=paper_scale).get(settings.arm, {})

    def source(name: str) -> str:
        if values[name] != before[name]:
            value, of_arm = arm.get(name, (None, ""))
            return f"arm {settings.arm}, {of_arm}" if value == values[name] else "given here"
        if name in recipe.small and not paper_scale:
            return f"small scale, {OURS}"
        return recipe.paper_scale[name][1] if name in recipe.paper_scale else f"default, {OURS}"

    return {name: Stated(values[name], source(name)) for name in dict.fromkeys(listed)}


def sent(gradients: int, m2: int, ranks: int, *, accumulated: bool) -> int:
    """Bytes that leave a rank in a step under DDP, without sums of some bytes a layer or rank.

        2 (W - 1) / W gradients     a ring's all-reduce; in the shards that VR exchanges, the same
        (W - 1) / W M2              more with VR, where a rank has several micro-batches

    Source:
        docs/scaling.md.
    """
    return round((ranks - 1) / ranks * (2 * gradients + (m2 if accumulated else 0)))


def _values(settings: Settings) -> dict[str, Value]:
    """By name, those of the task among them."""
    values = settings.as_dict()
    own: dict[str, Value] = values.pop("task")
    return {name: value for name, value in values.items() if name != "recipe"} | own


def _loop(recipe: Recipe, settings: Settings, samples: int, ranks: int) -> AdaptiveBatch:
    """The loop itself, over samples that nobody reads and a model of one weight."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(settings, model.named_parameters())
    numbered = Data(range(samples), lambda _: {})  # type: ignore[arg-type]
    settings = settings.changed({"workers": 0})
    virtual_ranks = math.lcm(settings.virtual_ranks, ranks)
    joins = settings.engine == "deepspeed" and micro_batch_optimizer(optimizer) is not None
    least = _JOINED * ranks if joins else None
    return loop_over(numbered, settings, model, optimizer, virtual_ranks, min_micro_batches=least)


def _sizes(loop: AdaptiveBatch, settings: Settings, samples: int) -> dict[str, int]:
    """The batch at the start, and its least and largest, as far as policies know."""
    policy, start = loop.controller.policy, loop.controller.decision.batch_size
    if isinstance(policy, Fixed):
        return {"start": start}
    least, largest = loop.controller.min_batch, loop.controller.max_batch or samples
    if isinstance(policy, Schedule):
        noise = GradientStatistics(1.0, 1.0, samples=start, micro_batches=2)
        total = settings.epochs * samples
        wanted = [
            policy.decide(
                noise,
                TrainingState(
                    start,
                    start,
                    settings.base_batch,
                    samples=seen,
                    steps=seen // start,
                    epoch=seen // samples,
                    max_batch=largest,
                ),
            ).batch_size
            for seen in range(0, total, max(1, total // _PLACES))
        ]
        least, largest = min(wanted), min(largest, max(wanted))
    return {"start": start, "least": least, "largest": largest}


def _planned(
    settings: Settings, plan: BatchPlan, keeps: MemoryEstimate, samples: int, ranks: int
) -> Planned:
    batch = plan.batch_size
    accumulation = plan.accumulation * plan.ranks // ranks
    return Planned(
        plan,
        accumulation,
        settings.epochs * math.ceil(samples / batch),
        _rates(settings, batch, samples),
        sent(keeps.gradients, keeps.m2_sent, ranks, accumulated=accumulation > 1),
    )


def _rates(settings: Settings, batch: int, samples: int) -> tuple[float, ...]:
    """The learning rates at `MOMENTS`, as they are read: in the middle of a base batch."""
    schedule, base = LRSchedule(settings.lr_schedule), settings.base_batch
    rule = None if settings.lr_scaling == "none" else settings.lr_scaling
    lr = settings.lr * resolve_scaling(rule, base)(batch, base, None)
    if settings.lr_schedule == "constant":
        return (lr,) * len(MOMENTS)
    total, factor = settings.epochs * samples, schedule.over(settings.epochs, samples)
    ticks = [0, schedule.warmup(samples) // base, total // 2 // base, (total - 1) // base]
    return tuple(lr * factor((tick + 0.5) * base) for tick in ticks)
