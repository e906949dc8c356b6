"""A late switch: the first batch size until a moment, then a policy."""

from dataclasses import dataclass, replace
from typing import Annotated

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import Amount, WarmupLength
from bigbatch.policies.policy import Decision, Needs, Policy, TrainingState, needs_of
from bigbatch.setting_types import In, checked
from bigbatch.statistics.noise_scale import GradientStatistics

SwitchMoment = WarmupLength | Annotated[float, In("(0, 1)", "a share of the largest learning rate")]


@checked
@dataclass(frozen=True)
class LateSwitch:
    """Keeps the first batch size until a moment; from then on a policy decides.

    The moment is an amount of training, or a share d of the scheduled learning rate's largest value
    so far: the policy decides while the scheduled rate is at most d of it. If the rate rises above
    that again, as with warm restarts, the batch returns to its first size.

    Args:
        at: "60 epochs", "4M samples" or "500 steps"; or d, in (0, 1).
        policy: the policy that decides late, with its `max_batch`, which holds from the start.
    Raises:
        SettingError: `at` is neither, or `policy` is not a policy.
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

    at: SwitchMoment
    policy: Policy

    def __post_init__(self) -> None:
        needs_of(self.policy)  # refuses what is not a policy

    @property
    def needs(self) -> Needs:
        """Those of the policy, and the decay of the rate if the moment is a share of it."""
        needs = needs_of(self.policy)
        follows_rate = isinstance(self.at, float) or needs.lr_decay
        return replace(needs, batch_size=None, lr_decay=follows_rate)

    def decide(self, statistics: GradientStatistics | None, now: TrainingState) -> Decision:
        """The first batch size before the moment, the policy's decision after it."""
        if self._is_late(now):
            # None only for a policy that needs none
            return self.policy.decide(statistics, now)  # type: ignore[arg-type]
        share = isinstance(self.at, float)
        moment = f"{self.at} of the peak learning rate" if share else self.at
        return Decision(now.first_batch_size, f"before the switch at {moment}")

    def _is_late(self, now: TrainingState) -> bool:
        if not isinstance(self.at, float):
            return Amount.parse(self.at).times(now.samples, now.steps, now.epoch) >= 1
        if now.lr_decay is None:
            raise SettingError(
                f"LateSwitch(at={self.at:g}) follows the scheduled learning rate, and now.lr_decay "
                'is None; pass TrainingState(lr_decay=), or an amount such as at="60 epochs"'
            )
        return now.lr_decay <= self.at * (1 + 1e-9)  # 0.1 x 0.3 / 0.1 is not 0.3
