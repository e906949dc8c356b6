"""Policies that follow the scheduled learning rate."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from bigbatch.errors import SettingError
from bigbatch.policies.plan import clamp
from bigbatch.policies.policy import (
    Decision,
    Needs,
    Policy,
    TrainingState,
    needs_of,
    require_policy,
    rounded_size,
)
from bigbatch.setting_types import Count, In, checked
from bigbatch.statistics.noise_scale import GradientStatistics

RateShare = Annotated[float, In("(0, 1)", "a share of the largest learning rate")]


@checked
@dataclass(frozen=True, kw_only=True)
class Seesaw:
    """Shares each cut of the learning rate between the rate and the batch.

    Where a schedule cuts the rate by x, the rate falls by sqrt(x) and the batch grows by x:

        B = B_first / d,    d = scheduled rate / its largest so far

    The rate in force is scheduled rate x sqrt(B / B_base) by `lr_scaling="sqrt"`, which this policy
    needs, so it falls by sqrt(x). A batch that cannot grow leaves the rest of the cut in the rate.
    A rate that rises, as in a warm-up, leaves the batch at its first size.

    Args:
        cap: a policy that limits the growth, `NoiseScale()` for example. It never takes the batch
            below its first size. If it needs statistics, both decide by its averages, once filled.
        max_batch: upper bound in samples; None for none.
    Raises:
        SettingError: `cap` is not a policy; by `AdaptiveBatch`, another `lr_scaling`.
    Source:
        Seesaw (arXiv 2510.14717).
    Example:
        >>> now = TrainingState(128, 128, first_batch_size=128, lr_decay=0.25)
        >>> Seesaw().decide(None, now)
        Decision(batch_size=512, reason='learning rate at 0.25 of its peak', lr_factor=1.0)
    """

    cap: Policy | None = None
    max_batch: Count | None = None

    def __post_init__(self) -> None:
        if self.cap is not None:
            require_policy(self.cap, "cap")

    @property
    def policy(self) -> Policy | None:
        """The cap."""
        return self.cap

    @property
    def needs(self) -> Needs:
        """Those of the cap, without its bounds, and the decay of the rate."""
        cap = Needs(statistics=False) if self.cap is None else needs_of(self.cap)
        return replace(
            cap,
            lr_decay=True,
            lr_scaling="sqrt",
            max_change=None,
            min_batch=1,
            max_batch=self.max_batch,
            batch_size=None,
        )

    def decide(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        """The batch that the rate asks for, within the cap."""
        decay = _decay(now, "Seesaw", "take a Schedule in its place")
        size = now.first_batch_size / decay if decay else math.inf
        reason = f"learning rate at {decay:.3g} of its peak"
        decision = Decision(rounded_size(size, now, self.max_batch), reason)
        if self.cap is not None:
            # None only for a cap that needs none
            limit = self.cap.decide(statistics, now)  # type: ignore[arg-type]
            if limit.batch_size < decision.batch_size:
                least = min(now.first_batch_size, decision.batch_size)
                decision = replace(
                    decision,
                    batch_size=max(least, limit.batch_size),
                    reason=f"{decision.reason}; capped: {limit.reason}",
                    trial=limit.trial,
                )
        return replace(decision, batch_size=clamp(decision.batch_size, 1, self.max_batch))


@checked
@dataclass(frozen=True)
class LateSwitch:
    """Keeps the first batch size until the learning rate has fallen; from then on a policy decides.

    The policy decides while the scheduled rate is at most the share `at` of its largest value so
    far. If the rate rises above that again, as with warm restarts, the batch returns to its first
    size. `Controller(warmup="60 epochs")` switches after an amount of training.

    Args:
        at: share of the largest rate, in (0, 1).
        policy: the policy that decides late, with its `max_batch`, which holds from the start.
    Raises:
        SettingError: `at` is out of range, or `policy` is not a policy.
    Source:
        arXiv 2602.14208.
    Example:
        >>> from bigbatch import Fixed
        >>> policy = LateSwitch(0.3, Fixed(1024))
        >>> now = TrainingState(128, 128, first_batch_size=128, lr_decay=0.5)
        >>> policy.decide(None, now)
        Decision(batch_size=128, reason='before the switch at 0.3 of the peak learning rate', \
lr_factor=1.0)
        >>> policy.decide(None, TrainingState(128, 128, lr_decay=0.25)).batch_size
        1024
    """

    at: RateShare
    policy: Policy

    def __post_init__(self) -> None:
        needs_of(self.policy)  # refuses what is not a policy

    @property
    def needs(self) -> Needs:
        """Those of the policy, and the decay of the rate."""
        return replace(needs_of(self.policy), batch_size=None, lr_decay=True)

    def decide(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        """The first batch size before the switch, the policy's decision after it."""
        decay = _decay(now, "LateSwitch", 'take Controller(warmup="60 epochs") in its place')
        if decay <= self.at * (1 + 1e-9):  # 0.1 x 0.3 / 0.1 is not 0.3
            # None only for a policy that needs none
            return self.policy.decide(statistics, now)  # type: ignore[arg-type]
        reason = f"before the switch at {self.at} of the peak learning rate"
        return Decision(now.first_batch_size, reason)


def _decay(now: TrainingState, name: str, other: str) -> float:
    """`now.lr_decay`; where it is not known, an error that names another way."""
    if now.lr_decay is None:
        raise SettingError(
            f"{name} follows the scheduled learning rate, and now.lr_decay is None; pass "
            f"TrainingState(lr_decay=), or {other}"
        )
    return now.lr_decay
