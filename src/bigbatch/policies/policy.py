"""Batch-size policies: (statistics, now) -> Decision, each a small class with one method."""

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from bigbatch.errors import SettingError
from bigbatch.policies.plan import clamp, require_bounds
from bigbatch.policies.step_time import TimedSize
from bigbatch.setting_types import Cosine, Count, Growth, In, NotNegative, Positive, Unit, checked
from bigbatch.statistics.noise_scale import GradientStatistics

MAX_CHANGE = 1.1  # of one decision, for policies that go to a multiple of the noise scale at once

Shrinkage = Annotated[float, In("(0, 1)")]


@checked
@dataclass(frozen=True)
class Decision:
    """The batch size of the next step, and a factor for its learning rate.

    Args:
        batch_size: samples per optimizer step over all ranks, before any rounding.
        reason: the reason, in words for a log.
        lr_factor: multiplies the learning rate on top of what the batch size asks for.
        advice: batch size that `Shadow` advises; no step takes it.
        trial: whether the size is only tried, to learn something from its steps.
    Raises:
        SettingError: a size below 1, or a factor that is negative or not finite.
    """

    batch_size: Count
    reason: str
    lr_factor: NotNegative = 1.0
    advice: Count | None = field(default=None, kw_only=True, repr=False)  # the reason says it too
    trial: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True)
class TrainingState:
    """The state of a training when a policy is asked.

    Args:
        target_batch_size: batch size that was last decided, before it is rounded to a plan.
        batch_size: samples of the present step.
        samples: samples consumed so far, the present step included.
        steps: optimizer steps so far, the present one included.
        epoch: passes over the data completed.
        first_batch_size: the controller's first batch size.
        min_batch: the controller's lower bound.
        max_batch: the controller's upper bound, None for none.
        lr_decay: scheduled learning rate of the next step over the largest so far, of all groups:
            1 until it is cut. None unless the policy has `Needs(lr_decay=True)`.
        step_times: times of steps so far, by batch size, with `Needs(history=True)`.
        loss_trend: standard errors by which the loss has fallen lately, as in `LossTrend`; None if
            that is not known yet, or without `Needs(history=True)`.
    """

    target_batch_size: int
    batch_size: int
    _: KW_ONLY
    samples: int = 0
    steps: int = 0
    epoch: int = 0
    first_batch_size: int = 1
    min_batch: int = 1
    max_batch: int | None = None
    lr_decay: float | None = None
    step_times: tuple[TimedSize, ...] = ()
    loss_trend: float | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a policy needs of the loop that asks it: its attribute `needs`, if it has any.

    Args:
        statistics: whether it decides by statistics. False for one that decides without them, as a
            schedule does: it is asked after every step, with None for one that was not measured.
        average: whether the statistics of a single step are not enough; a controller averages them.
        history: whether it reads `now.step_times` or `now.loss_trend`.
        lr_decay: whether it reads `now.lr_decay`.
        lr_scaling: the only `lr_scaling` that it works with; "any" for all of them.
        max_change: the largest factor of one change; None for no limit.
        min_batch: lower bound of the batch size; None for the first batch size, or for 1 if it
            decides without statistics.
        max_batch: upper bound of the batch size; None for none.
        batch_size: the first batch size; None for that of the loop.
        unit: what its sizes and amounts count; None if any unit will do.
    Raises:
        SettingError: a value outside its range, or crossed bounds.
    """

    statistics: bool = True
    average: bool = False
    history: bool = False
    lr_decay: bool = False
    lr_scaling: Literal["any", "sqrt", "linear", "adascale"] | None = "any"
    max_change: Growth | None = None
    min_batch: Count | None = None
    max_batch: Count | None = None
    batch_size: Count | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        require_bounds(self.min_batch, self.max_batch)


class Policy(Protocol):
    """Anything with this method, a pure function: a controller may call it for other cases.

    Optional: `needs`, of type `Needs`; `state_dict` and `load_state_dict`, if it has a state that
    is saved with the training.
    """

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """The next batch size."""


@checked
@dataclass(frozen=True)
class Fixed:
    """Keeps one batch size, whatever the statistics are."""

    batch_size: Count

    @property
    def needs(self) -> Needs:
        """No statistics."""
        return Needs(statistics=False, batch_size=self.batch_size)

    def decide(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        """The same batch size again."""
        return Decision(self.batch_size, "fixed")


class Bounded:
    """A policy with bounds that goes by averages, and changes the batch a little at a time."""

    min_batch: int | None
    max_batch: int | None

    def __post_init__(self) -> None:
        require_bounds(self.min_batch, self.max_batch)

    @property
    def needs(self) -> Needs:
        """Averages, and small changes."""
        return Needs(
            average=True, max_change=MAX_CHANGE, min_batch=self.min_batch, max_batch=self.max_batch
        )

    def bounded(self, size: float, reason: str, now: TrainingState) -> Decision:
        """The decision for a size, rounded and within the bounds."""
        batch_size = rounded_size(size, now, self.max_batch)
        return Decision(clamp(batch_size, self.min_batch or 1, self.max_batch), reason)


@checked
@dataclass(frozen=True)
class SimiGrad(Bounded):
    """Grows or shrinks the batch so that its gradient similarity stays at a target.

        phi < target:             B <- max(B + 1, int(grow B))
        phi > target and B > 1:   B <- max(1, min(B - 1, int(shrink B)))
        phi = target, or not finite: B stays

    then B is moved into [min_batch, max_batch]. The fixed point is B = B_simple 2 phi / (1 - phi).

    Args:
        target: target similarity, inside (-1, 1).
        min_batch: lower bound in samples; None for the first batch size, in a training.
        max_batch: upper bound in samples; None for none (in `AdaptiveBatch`: the data set).
        grow: factor of one growth, above 1.
        shrink: factor of one shrinkage, inside (0, 1).
    Raises:
        SettingError: a value outside its range, or crossed bounds.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021), algorithm 1, and the rule of its published code.
    Example:
        >>> SimiGrad(target=0.2).next_batch(similarity=0.1, batch_size=128)
        140
    """

    target: Cosine = 0.2
    min_batch: Count | None = None
    max_batch: Count | None = None
    grow: Growth = 1.1
    shrink: Shrinkage = 0.9

    @property
    def needs(self) -> Needs:
        """Averages; a change is as small as `grow` and `shrink` say."""
        return replace(super().needs, max_change=None)

    def next_batch(self, similarity: float, batch_size: int) -> int:
        """Applies the paper's rule, bounds included."""
        if -math.inf < similarity < self.target:
            batch_size = max(batch_size + 1, int(self.grow * batch_size))
        elif self.target < similarity < math.inf and batch_size > 1:
            batch_size = max(1, min(batch_size - 1, int(self.shrink * batch_size)))
        return clamp(batch_size, self.min_batch or 1, self.max_batch)

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """Applies the rule to the last decision, before it was rounded."""
        phi = statistics.similarity
        order = "<" if phi < self.target else ">" if phi > self.target else "="
        order = order if math.isfinite(phi) else "not finite, target"
        reason = f"similarity {phi:.3f} {order} {self.target:g}"
        return Decision(self.next_batch(phi, now.target_batch_size), reason)


@checked
@dataclass(frozen=True)
class NoiseScale(Bounded):
    """Sets the batch to a multiple of the noise scale.

        B = multiple x B_simple, rounded, inside [min_batch, max_batch]

    If the noise scale is +inf (no signal was measured), B is max_batch, the policy's or the
    controller's; without any it does not change, nor if the noise scale is nan. The noise scale of
    one step is often +inf, so leave the average of `Controller(smoothing=...)` on.

    Args:
        multiple: B over the noise scale, positive; 1 costs twice the fewest steps and samples.
        min_batch: lower bound in samples; None for the first batch size, in a training.
        max_batch: upper bound in samples; None for none.
    Raises:
        SettingError: a multiple that is not positive and finite, or crossed bounds.
    Source:
        McCandlish et al. 2018 (arXiv 1812.06162), section 2; docs/policies.md.
    Example:
        >>> step = GradientStatistics(1.0, 576.0, samples=128, micro_batches=4)
        >>> NoiseScale(multiple=0.5).decide(step, TrainingState(128, 128))
        Decision(batch_size=288, reason='0.5 x noise scale 576', lr_factor=1.0)
    """

    multiple: Positive = 1.0
    min_batch: Count | None = None
    max_batch: Count | None = None

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """Decides for the multiple of the measured noise scale."""
        scale = statistics.noise_scale
        return self.bounded(
            self.multiple * scale, f"{self.multiple:g} x noise scale {scale:.0f}", now
        )


def rounded_size(size: float, now: TrainingState, max_batch: int | None) -> int:
    """A batch size as an int. +inf becomes the upper bound; nan, and +inf unbounded, no change."""
    if math.isfinite(size):
        return round(size)
    bounds = [bound for bound in (max_batch, now.max_batch) if bound is not None]
    return min(bounds) if bounds and not math.isnan(size) else now.target_batch_size


@dataclass(frozen=True)
class Shadow:
    """Reports what another policy would decide, and changes nothing.

    The advised size is in the reason and in `Decision.advice`.

    Args:
        policy: the policy that advises, within its bounds and the controller's. The controller's
            other options act on changes, so they do not act on advice.
    Example:
        >>> step = GradientStatistics(1.0, 576.0, samples=128, micro_batches=4)
        >>> decision = Shadow(NoiseScale()).decide(step, TrainingState(128, 128))
        >>> decision, decision.advice
        (Decision(batch_size=128, reason='advice: 576 (1 x noise scale 576)', lr_factor=1.0), 576)
    """

    policy: Policy

    def __post_init__(self) -> None:
        require_policy(self.policy)

    @property
    def needs(self) -> Needs:
        """Those of the policy, at the batch size and the rates of the loop; it may advise less."""
        needs = needs_of(self.policy)
        return replace(needs, batch_size=None, lr_scaling="any", min_batch=needs.min_batch or 1)

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """Keeps the batch size, with the policy's decision as advice unless it is a trial."""
        decision = self.policy.decide(statistics, now)
        if decision.trial:
            return Decision(now.target_batch_size, f"no advice: {decision.reason}")
        advice = clamp(decision.batch_size, now.min_batch, now.max_batch)
        reason = f"advice: {advice} ({decision.reason})"
        return Decision(now.target_batch_size, reason, advice=advice)


def needs_of(policy: Policy) -> Needs:
    """What a policy needs of the loop that asks it.

    Raises:
        SettingError: it is not a policy, or its attribute `needs` is something else.
    """
    require_policy(policy)
    needs = getattr(policy, "needs", Needs())
    if not isinstance(needs, Needs):
        raise SettingError(f"{type(policy).__name__}.needs is {needs!r}; set needs = bb.Needs(...)")
    return needs


def layers_of(policy: Policy) -> list[Any]:
    """The policy, and those inside it as `policy`, from the outermost."""
    inner = getattr(policy, "policy", None)
    return [policy, *(layers_of(inner) if inner is not None else ())]


def has_state(value: object) -> bool:
    """Whether an object has a state that can be saved and loaded."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def require_policy(policy: Policy, name: str = "policy") -> None:
    """Raises SettingError for an object that is not a policy, given as an argument `name`."""
    if isinstance(policy, type):
        raise SettingError(f"{name}={policy.__name__} is a class; pass {policy.__name__}(...)")
    if not callable(getattr(policy, "decide", None)):
        raise SettingError(f"{name}={policy!r} has no method decide(statistics, now)")
