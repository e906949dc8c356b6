"""Smooths statistics, asks a policy, holds back changes, and keeps the decided batch size."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import Amount, Smoothing, WarmupLength
from bigbatch.policies.bound_notes import BoundNotes, noted
from bigbatch.policies.dead_band import DeadBand, is_inside
from bigbatch.policies.goodput import Goodput
from bigbatch.policies.plan import PlanConstraints, clamp, require_bounds
from bigbatch.policies.policy import (
    Decision,
    Fixed,
    NoiseScale,
    Policy,
    TrainingState,
    has_state,
    layers_of,
    needs_of,
)
from bigbatch.setting_types import Count, Growth, Unit, checked
from bigbatch.state_checks import loads_state
from bigbatch.statistics.averages import AdaptiveAverage, NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics


class Controller:
    """Asks a policy after every step and keeps the batch size that it decides.

    The kept size is the policy's own, before it is rounded to a plan: with the rounded size, a
    policy whose steps are smaller than the rounding would never move.

    Args:
        policy: any object with `decide(statistics, now) -> Decision`. If it has `state_dict` and
            `load_state_dict`, its state is saved too.
        batch_size: the first batch size, in samples over all ranks.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        min_batch: lower bound of the batch size, in samples; the policy's own holds too. If neither
            is given, a policy that decides by statistics never goes below `batch_size` in a
            training, and down to 1 in calls of `next` by hand.
        max_batch: upper bound; the policy's own holds too. None for no bound.
        decide_every: the policy is asked after each n-th step only; without `smoothing`, one that
            needs statistics is asked after each n-th measured step.
        smoothing: window over which signal and noise of measured steps are averaged before the
            policy sees them: "16 steps", "4K samples" (tokens, if they are the unit), or "auto",
            the longest of 4 to 64 steps that shows no change if the policy wants an average, else
            none. None for none, as in SimiGrad's paper. The batch keeps its size until a quarter of
            the window is filled, 4 steps with "auto". Then the policy decides after every step,
            measured or not, as an average holds at any batch size.
        dead_band: 0.1 holds changes that the policy would not make if the batch were 10 % nearer
            to the size that it decides; docs/policies.md has the rule.
        max_change: f lets one decision multiply or divide the batch by f at most, yet change it
            by one sample at least; None for no limit. "auto" is the policy's own `max_change`, 1.1
            for one that goes to a multiple of the noise scale, and no limit if it has none.
        warmup: how long the batch keeps its first size: "500 steps", "8K samples" or "1 epoch";
            None for no warm-up.
    Raises:
        SettingError: a value outside its range, crossed bounds, or `policy` cannot decide.
    Example:
        >>> from bigbatch import GradientStatistics, SimiGrad
        >>> controller = Controller(SimiGrad(target=0.2), batch_size=128)
        >>> step = GradientStatistics(1.0, 576.0, samples=128, micro_batches=4)
        >>> [controller.next(step).batch_size for _ in range(5)]
        [128, 128, 128, 140, 154]
        >>> controller.decision
        Decision(batch_size=154, reason='similarity 0.100 < 0.2', lr_factor=1.0)
    """

    @checked
    def __init__(
        self,
        policy: Policy,
        batch_size: Count,
        base_batch: Count | None = None,
        *,
        min_batch: Count | None = None,
        max_batch: Count | None = None,
        decide_every: Count = 1,
        smoothing: Smoothing = "auto",
        dead_band: DeadBand = 0.0,
        max_change: Growth | Literal["auto"] | None = "auto",
        warmup: WarmupLength | None = None,
    ) -> None:
        base_batch = batch_size if base_batch is None else base_batch
        self.needs = needs_of(policy)
        self._stateful_policy = _stateful(policy, dead_band)
        largest_change = self.needs.max_change if max_change == "auto" else max_change
        is_window = smoothing not in (None, "auto")
        self._smoothing = Amount.parse(str(smoothing)) if is_window else None
        self._average = _average(smoothing, wants_average=self.needs.average)
        self._warmup = Amount.parse(warmup) if warmup else None
        if smoothing is None and isinstance(layers_of(policy)[-1], NoiseScale | Goodput):
            warnings.warn(
                f"{type(policy).__name__} goes by one step's noise scale, which is often infinite; "
                'set smoothing="auto", or a window: "4K samples", say',
                stacklevel=3,
            )
        settings = {
            "policy": policy,
            "base_batch": base_batch,
            "min_batch": min_batch,
            "max_batch": max_batch,
            "decide_every": decide_every,
            "smoothing": smoothing if self._smoothing is None else str(self._smoothing),
            "dead_band": dead_band,
            "max_change": largest_change,
            "warmup": self._warmup and str(self._warmup),
        }
        # as text, without addresses of objects: a resumed run names what changed
        self.settings = {name: _as_text(value) for name, value in settings.items()}
        self._decide_every, self._dead_band = decide_every, dead_band
        self._max_change = largest_change
        self._samples = 0.0
        self._steps = 0
        self.policy = policy
        self.base_batch = base_batch
        is_given = (min_batch, self.needs.min_batch) != (None, None)
        self._keeps_first = self.needs.statistics and not is_given
        self.given_min_batch: int = self.needs.min_batch or 1
        self.min_batch = self.given_min_batch  # at least that; by default the first batch size
        self.max_batch: int | None = self.needs.max_batch
        self.first_batch_size = batch_size  # before it is moved into the bounds
        self._constraints: PlanConstraints | None = None
        self._notes = BoundNotes()
        holds_back = warmup is not None or decide_every > 1 or dead_band > 0
        is_fixed = type(policy) is Fixed and self._average is None
        self._is_constant = is_fixed and not holds_back
        self._repeated: Decision | None = None  # the decision that a constant policy repeats
        self.decision = Decision(batch_size, "start")
        self.limit(min_batch or 1, max_batch)
        self._given_max_batch = self.max_batch  # a training may lower it to its data set

    @property
    def needs_measurement(self) -> bool:
        """Whether it cannot decide now unless the step was measured: no average is filled."""
        return self.needs.statistics and (self._average is None or not self._average.filled)

    def next(
        self, statistics: GradientStatistics | None, now: TrainingState | None = None
    ) -> Decision:
        """The decision after a step that measured `statistics`.

        Args:
            statistics: statistics of the last step, over all ranks; None if it was not measured.
                A policy that needs them then gets the average, at the batch size of the step.
            now: state of the training; the controller sets the target, the bounds and the first
                batch size.
                Default: the samples and steps that the controller itself has counted.
        Raises:
            SettingError: the policy did not return a Decision, or it needs statistics that neither
                the step nor an average has.
        """
        if statistics is None and self.needs_measurement:
            name = type(self.policy).__name__
            raise SettingError(f"{name} needs the statistics of the step, which has none")
        now, measured = self._count_step(statistics, now), statistics is not None
        statistics = self._averaged(statistics, now)
        warmup = self._warmup
        if warmup is not None and warmup.times(now.samples, now.steps, now.epoch) < 1:
            self.decision = self._keep(f"held: warm-up of {warmup}")
        elif self._average is not None and self.needs_measurement:
            self.decision = self._keep("held: the average fills")
        elif self._steps % self._decide_every:
            self.decision = self._keep(f"held: decides every {self._decide_every} steps")
        else:
            previous = self.decision
            self.decision = self._decide(statistics, now, measured=measured)
            if self._is_constant and self.decision == previous:
                self._repeated = self.decision
        return self.decision

    def require_unit(self, unit: Unit) -> None:
        """Raises SettingError unless amounts and sizes count what the training counts."""
        amounts = [self._warmup, self._smoothing]
        counted = {f"{amount.unit}s" for amount in amounts if amount is not None}
        wrong = {"samples", "tokens"} - {unit}
        if found := ({*counted, self.needs.unit} & wrong):
            remedy = {
                "samples": 'give a Schedule tokens_per_sample=, or set Batches(unit="tokens")',
                "tokens": "leave tokens_per_sample= of a Schedule out",
            }
            raise SettingError(
                f"the policy or its controller counts {found.pop()} and the training {unit}; write "
                f"{unit}, or {remedy[unit]}"
            )

    @property
    def repeats(self) -> bool:
        """Whether the next decision is the present one: `Fixed` has decided within the bounds."""
        return self._repeated is self.decision

    def repeat(self, samples: int) -> bool:
        """Counts a step of so many samples, if the decision after it is the present one."""
        if not self.repeats:
            return False
        self._samples += samples
        self._steps += 1
        return True

    def _count_step(
        self, statistics: GradientStatistics | None, now: TrainingState | None
    ) -> TrainingState:
        """Counts a step; returns the state of the training with the controller's own sizes."""
        if statistics is not None:
            size = statistics.samples
        elif now is not None:
            size = now.batch_size
        else:
            raise SettingError("a step without statistics needs now=, the state of the training")
        self._samples += size
        self._steps += 1
        counted = TrainingState(0, round(size), samples=round(self._samples), steps=self._steps)
        return replace(
            now or counted,
            target_batch_size=self.decision.batch_size,
            min_batch=self.min_batch,
            max_batch=self.max_batch,
            first_batch_size=self.first_batch_size,
        )

    def _averaged(
        self, statistics: GradientStatistics | None, now: TrainingState
    ) -> GradientStatistics | None:
        """What the policy sees: the average, if there is one; it includes a measured step."""
        if statistics is None:
            if not self.needs.statistics or self._average is None:
                return None
            return self._average.at(GradientStatistics(math.nan, math.nan, now.batch_size, 0))
        return statistics if self._average is None else self._average.update(statistics)

    def limit(
        self,
        min_batch: int = 1,
        max_batch: int | None = None,
        constraints: PlanConstraints | None = None,
    ) -> None:
        """Narrows the bounds, and moves the batch size into them.

        A training gives its constraints. The lower bound that it then has by default yields to the
        upper one, and to the constraints.

        Raises:
            SettingError: nothing lies between the bounds.
        """
        require_bounds(min_batch, max_batch)
        self.given_min_batch = self.min_batch = max(self.given_min_batch, min_batch)
        bounds = [bound for bound in (self.max_batch, max_batch) if bound is not None]
        self.max_batch = min(bounds, default=None)
        require_bounds(self.min_batch, self.max_batch)
        self._constraints = constraints or self._constraints
        if self._keeps_first and self._constraints is not None:
            first = self._constraints.reachable(self.first_batch_size, self.max_batch)
            self.min_batch = max(self.min_batch, first)
        self.decision = self._within_bounds(self.decision)

    def facts(self) -> dict[str, object]:
        """Everything that must be equal on all ranks, by name."""
        return {**self.state_dict(), "min_batch": self.min_batch, "max_batch": self.max_batch}

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`: numbers and text only."""
        return {
            "target_batch_size": self.decision.batch_size,
            "lr_factor": self.decision.lr_factor,
            "first_batch_size": self.first_batch_size,
            "samples": self._samples,
            "steps": self._steps,
            "notes": self._notes.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "policy": None if self._stateful_policy is None else self._stateful_policy.state_dict(),
            "settings": dict(self.settings),
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state, with the policy, options and bounds of the constructor.

        One warning names the settings that had other values when the state was saved.
        """
        size, lr_factor = int(state["target_batch_size"]), float(state["lr_factor"])
        self.first_batch_size = int(state["first_batch_size"])
        self.decision = Decision(size, "resumed", lr_factor)
        self.limit()
        self._samples, self._steps = float(state["samples"]), int(state["steps"])
        self._notes.load_state_dict(state["notes"])
        saved = state["average"] or {}
        present = {} if self._average is None else self._average.state_dict()
        same_kind = saved.keys() == present.keys() and saved.get("unit") == present.get("unit")
        if self._average is not None and same_kind:
            self._average.load_state_dict(saved)  # else there was none, or one of another kind
        if self._stateful_policy is not None and state["policy"] is not None:
            self._stateful_policy.load_state_dict(state["policy"])
        warn_of_changes(state["settings"], self.settings)

    def _ask_policy(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        # None only for a policy that needs none
        decision = self.policy.decide(statistics, now)  # type: ignore[arg-type]
        if not isinstance(decision, Decision):
            raise SettingError(f"{self.policy!r}.decide returned {decision!r}, not a Decision")
        return decision

    def _decide(
        self, statistics: GradientStatistics | None, now: TrainingState, *, measured: bool
    ) -> Decision:
        wanted, present = self._ask_policy(statistics, now), now.target_batch_size
        decision = self._held_back(self._within_bounds(wanted), statistics, now)
        if decision.batch_size == self.max_batch != self._given_max_batch and (
            self.needs.statistics and present < decision.batch_size
        ):
            return noted(decision, self._notes.at_data_set(decision.batch_size))
        if measured and statistics is not None and self._average is not None:
            return noted(decision, self._lower_note(wanted, statistics.noise_scale, present))
        return decision

    def _held_back(
        self, decision: Decision, statistics: GradientStatistics | None, now: TrainingState
    ) -> Decision:
        """The decision after the dead band and the largest change."""

        def decide(statistics: GradientStatistics, now: TrainingState) -> Decision:
            return self._within_bounds(self._ask_policy(statistics, now))

        present = now.target_batch_size
        if statistics is not None and is_inside(self._dead_band, decide, decision, statistics, now):
            reason = f"{decision.reason}; held: inside the dead band of {self._dead_band:g}"
            return replace(decision, batch_size=present, reason=reason)
        if (factor := self._max_change) is None:
            return decision
        lowest = min(present - 1, math.ceil(present / factor))
        highest = max(present + 1, math.floor(present * factor))
        nearest = clamp(decision.batch_size, lowest, highest)
        if nearest == decision.batch_size:
            return decision
        reason = f"{decision.reason}; at most x{factor:g} a decision"
        return replace(decision, batch_size=nearest, reason=reason)

    def _lower_note(self, wanted: Decision, noise_scale: float, present: int) -> str:
        """The note of a batch above the noise scale that only `min_batch` keeps as large."""
        is_bound = wanted.batch_size == self.needs.min_batch  # the policy has cut its wish
        is_bound = is_bound and wanted.advice is None and not self.needs.lr_decay
        lower = wanted.batch_size < self.min_batch or is_bound
        if not lower or not noise_scale < present == self.min_batch:
            self._notes.above_lower()
            return ""
        limits = self._constraints
        smallest = None if limits is None else limits.plan(1, 1, self.max_batch).batch_size
        return self._notes.at_lower(present, noise_scale, smallest)

    def _keep(self, reason: str) -> Decision:
        return Decision(self.decision.batch_size, reason, self.decision.lr_factor)

    def _within_bounds(self, decision: Decision) -> Decision:
        batch_size = clamp(decision.batch_size, self.min_batch, self.max_batch)
        return replace(decision, batch_size=batch_size)


def controller_of(
    policy: Policy | Controller,
    constraints: PlanConstraints,
    *,
    batch_size: int | None,
    base_batch: int | None,
    samples: int | None,
    unit: Unit = "samples",
) -> Controller:
    """The controller of a training, with bounds that the data set and its plans can keep.

    Raises:
        SettingError: nothing lies between the bounds, the controller and the call both have sizes,
            or they count something else than the training.
    """
    if isinstance(policy, Controller):
        if (batch_size, base_batch) != (None, None):
            raise SettingError(
                "the controller has batch_size and base_batch of its own; leave them out here"
            )
        controller = policy
    else:
        assert batch_size is not None
        controller = Controller(policy, batch_size, base_batch)
    if samples is not None and samples < (ranks := constraints.virtual_ranks):
        raise SettingError(f"{samples} samples of an epoch are too few for {ranks} (virtual) ranks")
    controller.require_unit(unit)
    min_batch, is_new = controller.given_min_batch, controller.decision.reason == "start"
    start = controller.first_batch_size if is_new else controller.decision.batch_size
    if samples is not None and min_batch > samples:
        raise SettingError(f"min_batch={min_batch} exceeds the {samples} samples of an epoch")
    controller.limit(max_batch=samples, constraints=constraints)
    smallest = constraints.plan(1, 1, controller.max_batch).batch_size
    if 1 < min_batch < smallest:
        warnings.warn(
            f"min_batch={min_batch} is raised to {smallest}, the smallest step that can be cut "
            f"into {constraints.min_micro_batches} micro-batches",
            stacklevel=4,
        )
    controller.limit(min_batch=smallest)
    if controller.decision.batch_size != start:
        warnings.warn(
            f"batch_size={start} is out of bounds; min_batch={controller.min_batch} and "
            f"max_batch={controller.max_batch} hold, so training starts with "
            f"{controller.decision.batch_size}",
            stacklevel=4,
        )
    return controller


def _average(
    smoothing: str | None, *, wants_average: bool
) -> NoiseAverage | AdaptiveAverage | None:
    if smoothing == "auto":
        return AdaptiveAverage() if wants_average else None
    if smoothing is None:
        return None
    window = Amount.parse(smoothing)
    unit: Literal["steps", "samples"] = "steps" if window.unit == "step" else "samples"
    return NoiseAverage(float(window.count), unit)


def warn_of_changes(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Names, in one warning, the settings whose values differ from the saved ones, or are gone."""
    present = {name: current.get(name, "None") for name in saved}
    changes = [f"{n} was {x}, is {present[n]}" for n, x in saved.items() if present[n] != x]
    if changes:
        warnings.warn(f"{'; '.join(changes)}: the new one is used", stacklevel=4)


def _stateful(policy: Policy, dead_band: float) -> Any:
    """The part of a policy that has a state to save, if any."""
    part = next(filter(has_state, layers_of(policy)), None)
    if part is not None and dead_band:
        raise SettingError(
            "dead_band asks a policy about other cases, which one that remembers (it has "
            "state_dict) would take for steps; leave it out"
        )
    return part


def _as_text(value: object) -> str:
    """A text that is the same in every process, without addresses of objects."""
    if is_dataclass(value):
        parts = (f"{f.name}={_as_text(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
