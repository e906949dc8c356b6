"""The one stateful object of the decision: it smooths, asks, holds and remembers."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypedDict

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import Amount, SmoothingWindow, WarmupLength
from bigbatch.policies.hysteresis import DeadBand, Hysteresis
from bigbatch.policies.plan import inside, require_bounds
from bigbatch.policies.policy import Decision, Policy, Shadow, TrainingState, require_policy
from bigbatch.setting_types import Count, Coverage, Growth, checked
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics


class ControllerState(TypedDict):
    """What a controller needs to resume."""

    target_batch_size: int
    lr_factor: float
    samples: float
    steps: int
    average: dict[str, Any] | None
    policy: Any
    settings: dict[str, str]


class Controller:
    """Asks a policy after every step and remembers the batch size that it wants.

    What is remembered is the policy's own number, before any rounding to a plan: feeding back the
    rounded one would stall where a step of the policy is smaller than the rounding.

    Args:
        policy: any object with `decide(statistics, now) -> Decision`; where it has `state_dict` and
            `load_state_dict`, what it remembers is saved too.
        batch_size: where it starts, in samples over all ranks.
        base_batch: batch size that the learning rate was tuned for; default `batch_size`.
        min_batch: what is remembered never falls below, in samples; nor below the policy's own.
        max_batch: nor rises above, nor above the policy's own; None for no bound.
        decide_every: the policy is asked after each n-th measured step only.
        smoothing: window over which signal and noise are averaged before the policy sees them, in
            steps or samples: "16 steps", "4K samples"; None for none.
        dead_band: 0.1 holds changes that the policy would not want of a batch 10 % nearer to where
            it is going; `Hysteresis` has the rule.
        max_change: f lets one decision multiply or divide the batch by f at most, yet change it
            by one sample at least; None for no limit.
        confidence: holds changes unless the policy wants them at both ends of an interval of this
            coverage: that of the window with `smoothing`, else the meter's own.
        warmup: how long the batch stays where it starts: "500 steps", "8K samples" or "1 epoch";
            None for no time.
    Raises:
        SettingError: a value outside its range, crossed bounds, or `policy` cannot decide.
    Example:
        >>> from bigbatch import GradientStatistics, SimiGrad
        >>> controller = Controller(SimiGrad(target=0.2), batch_size=128)
        >>> controller.next(GradientStatistics(1.0, 576.0, samples=128, micro_batches=4))
        Decision(batch_size=140, reason='similarity 0.100 < 0.2', lr_factor=1.0)
    """

    @checked
    def __init__(
        self,
        policy: Policy,
        batch_size: Count,
        base_batch: Count | None = None,
        *,
        min_batch: Count = 1,
        max_batch: Count | None = None,
        decide_every: Count = 1,
        smoothing: SmoothingWindow | None = None,
        dead_band: DeadBand = 0.0,
        max_change: Growth | None = None,
        confidence: Coverage | None = None,
        warmup: WarmupLength | None = None,
    ) -> None:
        base_batch = batch_size if base_batch is None else base_batch
        self._hysteresis = Hysteresis(dead_band, confidence)
        self._remembers = _remembering(policy, asked=bool(dead_band or confidence))
        window = Amount.parse(smoothing) if smoothing else None
        self._average = _average_over(window, confidence) if window else None
        self._warmup = Amount.parse(warmup) if warmup else None
        if smoothing is None and getattr(policy, "wants_average", False):
            warnings.warn(
                f"{type(policy).__name__} goes by one step's noise scale, which is often infinite; "
                'set smoothing="4K samples", say, and warmup="4K samples" to let that fill',
                stacklevel=3,
            )
        settings = {
            "policy": policy,
            "base_batch": base_batch,
            "min_batch": min_batch,
            "max_batch": max_batch,
            "decide_every": decide_every,
            "smoothing": window and str(window),
            "dead_band": dead_band,
            "max_change": max_change,
            "confidence": confidence,
            "warmup": self._warmup and str(self._warmup),
        }
        self._settings = {name: _described(value) for name, value in settings.items()}
        self._decide_every, self._max_change = decide_every, max_change
        self._samples = 0.0
        self._steps = 0
        self.policy = policy
        self.base_batch = base_batch
        self.min_batch: int = getattr(policy, "min_batch", 1)
        self.max_batch: int | None = getattr(policy, "max_batch", None)
        self.start = batch_size  # as it was asked for, whatever the bounds make of it
        self.decision = Decision(batch_size, "start")
        self.limit(min_batch, max_batch)

    def next(self, statistics: GradientStatistics, now: TrainingState | None = None) -> Decision:
        """The decision after a step that measured `statistics`.

        Args:
            statistics: of the step just done, over all ranks.
            now: state of the training; `target_batch_size` and the bounds are filled in. Default:
                what the controller can count itself: samples and steps, no epochs.
        Raises:
            SettingError: the policy returned something that is no Decision, or `confidence` has no
                interval to go by.
        """
        self._samples += statistics.samples
        self._steps += 1
        if now is None:
            batch_size, samples = round(statistics.samples), round(self._samples)
            now = TrainingState(0, batch_size, self.base_batch, samples, self._steps)
        now = replace(
            now,
            target_batch_size=self.decision.batch_size,
            min_batch=self.min_batch,
            max_batch=self.max_batch,
        )
        if self._average is not None:
            statistics = self._average.update(statistics)
        self._hysteresis.require_interval(self._ask, statistics, now)
        if self._warming_up(now):
            self.decision = self._stay(f"held: warm-up of {self._warmup}")
        elif self._steps % self._decide_every:
            self.decision = self._stay(f"held: decides every {self._decide_every} steps")
        else:
            self.decision = self._decide(statistics, now)
        return self.decision

    def limit(self, min_batch: int = 1, max_batch: int | None = None) -> None:
        """Narrows the bounds, and moves what is remembered into them.

        Raises:
            SettingError: nothing is left between them.
        """
        require_bounds(min_batch, max_batch)
        self.min_batch = max(self.min_batch, min_batch)
        bounds = [bound for bound in (self.max_batch, max_batch) if bound is not None]
        self.max_batch = min(bounds, default=None)
        require_bounds(self.min_batch, self.max_batch)
        self.decision = self._inside(self.decision)

    def digest(self) -> str:
        """Everything that has to be the same on all ranks, as text to compare or to hash."""
        return repr(self.facts())

    def facts(self) -> dict[str, object]:
        """The same, by name."""
        return {**self.state_dict(), "min_batch": self.min_batch, "max_batch": self.max_batch}

    def state_dict(self) -> ControllerState:
        """What `load_state_dict` needs: numbers and text only."""
        return {
            "target_batch_size": self.decision.batch_size,
            "lr_factor": self.decision.lr_factor,
            "samples": self._samples,
            "steps": self._steps,
            "average": None if self._average is None else self._average.state_dict(),
            "policy": None if self._remembers is None else self._remembers.state_dict(),
            "settings": dict(self._settings),
        }

    def load_state_dict(self, state: ControllerState) -> None:
        """Continues from a saved state; policy, options and bounds stay those of construction.

        One warning names the settings that were others when the state was saved.
        """
        self.decision = self._inside(
            Decision(state["target_batch_size"], "resumed", state["lr_factor"])
        )
        self._samples, self._steps = state["samples"], state["steps"]
        if self._average is not None and state["average"] is not None:
            self._average.load_state_dict(state["average"])
        if self._remembers is not None and state["policy"] is not None:
            self._remembers.load_state_dict(state["policy"])
        warn_of_changes(state["settings"], self._settings)

    def _ask(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        decision = self.policy.decide(statistics, now)
        if not isinstance(decision, Decision):
            raise SettingError(f"{self.policy!r}.decide returned {decision!r}, not a Decision")
        return self._inside(decision)

    def _decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        decision, bounds = self._ask(statistics, now), (self.min_batch, self.max_batch)
        doubt = self._hysteresis.doubt(self._ask, decision.batch_size, statistics, now, bounds)
        if doubt is not None:
            reason = f"{decision.reason}; held: {doubt}"
            return replace(decision, batch_size=now.target_batch_size, reason=reason)
        return self._limited(decision, now.target_batch_size)

    def _limited(self, decision: Decision, present: int) -> Decision:
        """No farther than one step of `max_change`."""
        most = self._max_change
        if most is None:
            return decision
        lowest = min(present - 1, math.ceil(present / most))
        highest = max(present + 1, math.floor(present * most))
        nearest = inside(decision.batch_size, lowest, highest)
        if nearest == decision.batch_size:
            return decision
        reason = f"{decision.reason}; at most x{most:g} a decision"
        return replace(decision, batch_size=nearest, reason=reason)

    def _warming_up(self, now: TrainingState) -> bool:
        return (
            self._warmup is not None and self._warmup.times(now.samples, now.steps, now.epoch) < 1
        )

    def _stay(self, reason: str) -> Decision:
        return Decision(self.decision.batch_size, reason, self.decision.lr_factor)

    def _inside(self, decision: Decision) -> Decision:
        batch_size = inside(decision.batch_size, self.min_batch, self.max_batch)
        return replace(decision, batch_size=batch_size)


def warn_of_changes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Says once which settings of a saved state are others now."""
    changed = [
        f"{name} was {before[name]}, is {new}"
        for name, new in now.items()
        if before.get(name, new) != new
    ]
    if changed:
        warnings.warn(f"{'; '.join(changed)}: the new one is used", stacklevel=3)


def has_state(thing: object) -> bool:
    """Whether it remembers something that can be saved."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _average_over(window: Amount, confidence: float | None) -> NoiseAverage:
    unit: Literal["samples", "steps"] = "steps" if window.unit == "step" else "samples"
    return NoiseAverage(float(window.count), unit, confidence=confidence)


def _remembering(policy: Any, *, asked: bool) -> Any:
    """The policy, or the one inside `Shadow`, where it has a state to save; else None.

    Args:
        policy: must be able to decide.
        asked: whether it will be asked about other cases.
    """
    require_policy(policy)
    while isinstance(policy, Shadow):
        policy = policy.policy
    if not has_state(policy):
        return None
    if asked:
        raise SettingError(
            "dead_band and confidence ask a policy about other cases, which one that remembers "
            "(it has state_dict) would take for steps; leave them out"
        )
    return policy


def _described(value: object) -> str:
    """As text that is the same in every process: no address of an object."""
    if is_dataclass(value):
        parts = (f"{f.name}={_described(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
