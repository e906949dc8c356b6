"""A policy that sees the critical batch size of branch tests in place of the noise scale."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import Amount, AmountIn
from bigbatch.policies.policy import (
    Decision,
    Policy,
    TrainingState,
    Wrapper,
    require_policy,
    stateful_part,
)
from bigbatch.setting_types import In, Positive, checked
from bigbatch.statistics.noise_scale import GradientStatistics

DEFAULT_SHARE = 0.05
DEFAULT_REPEATS = 6

Repeats = Annotated[int, In("[2, inf)", "since an interval needs a scatter")]


class _AmountOrPercent(AmountIn):
    """Amounts, and percentages of the samples seen."""

    def __contains__(self, text: str) -> bool:
        return _growth(text) is not None or super().__contains__(text)

    def __str__(self) -> str:
        return f'"20 %" or {super().__str__().removeprefix("such as ")}'


TestInterval = Annotated[str, _AmountOrPercent("step", "sample", "epoch")]


@checked
@dataclass
class BranchTest(Wrapper):
    """Corrects the noise that a policy sees, so that its noise scale is the critical batch size.

        grad_variance <- ratio grad_variance,   ratio = B_crit / B_simple of the last branch test

    `AdaptiveBatch` runs a test between two steps when one is due and affordable: tests may spend
    `share` of all samples so far. B_crit / B_simple changes slowly, so the last ratio serves until
    the next test; it is 1 before the first. A test whose interval has one end only moves the ratio
    as far as that end demands, and one that concludes nothing leaves it. The ratio is part of the
    state that is saved, and of the decision's reason. In between the policy is as pure as the
    one inside it, so `dead_band` and `confidence` work.

    Args:
        policy: the policy that decides; one that needs statistics.
        loss_of: batch -> mean loss of the model that trains, as for `AdaptiveBatch.branch_test`.
        every: when to test again: "20 %" after so many more samples than at the last test, or an
            amount such as "2 epochs", "4M samples", "1K steps".
        repeats: repeats of a test, at least 2.
        share: the largest share of the samples seen that all tests together may spend.
    Raises:
        SettingError: the policy does not depend on statistics, or a value is outside its range.
    Source:
        Merrill et al. 2025 (arXiv 2505.23971) for branches; docs/policies.md, docs/decisions/0018.
    Example:
        >>> from bigbatch import NoiseScale
        >>> policy = BranchTest(NoiseScale(), loss_of=lambda batch: batch.mean())
        >>> position = 9000, 90, 0  # samples, steps, epochs
        >>> policy.take(2e3, (1500, 2600), noise_scale=500.0, spent=100, position=position)
        >>> step = GradientStatistics(1.0, 600.0, samples=128, micro_batches=4)
        >>> policy.decide(step, TrainingState(128, 128, 128)).batch_size
        2400
    """

    policy: Policy
    loss_of: Callable[[Any], Any] = field(repr=False)
    every: TestInterval = "20 %"
    repeats: Repeats = DEFAULT_REPEATS
    share: Positive = DEFAULT_SHARE

    def __post_init__(self) -> None:
        require_policy(self.policy)
        if not getattr(self.policy, "needs_statistics", True):
            raise SettingError(
                f"{type(self.policy).__name__} decides without statistics, so a branch test cannot "
                "correct it; leave the branch test out"
            )
        self.ratio = 1.0
        self.spent = 0  # samples of all tests
        self._tested: tuple[int, int, int] | None = None  # samples, steps, epochs at the last test

    @property
    def counts_decisions(self) -> bool:
        """Whether a decision changes the state: that of the policy inside, if it has one."""
        inner = stateful_part(self.policy)
        return inner is not None and getattr(inner, "counts_decisions", True)

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """Asks the policy, with the corrected noise."""
        decision = self.policy.decide(_with_noise(statistics, self.ratio), now)
        tested = "no branch test yet"
        if self._tested is not None:
            tested = f"noise x {self.ratio:.3g} by the branch test at {self._tested[0]} samples"
        return replace(decision, reason=f"{decision.reason}; {tested}")

    def is_due(self, samples: int, steps: int, epochs: int) -> bool:
        """Whether it is time for a test; the first one is due as soon as it is affordable."""
        if self._tested is None:
            return True
        growth = _growth(self.every)
        if growth is not None:
            return samples >= (1 + growth) * self._tested[0]
        amount = Amount.parse(self.every)
        return amount.times(samples, steps, epochs) - amount.times(*self._tested) >= 1

    def allowance(self, samples: int) -> float:
        """Samples that a test may spend after so many samples of training."""
        return self.share * samples - self.spent

    def take(
        self,
        critical_batch: float,
        interval: tuple[float, float],
        *,
        noise_scale: float,
        spent: int,
        position: tuple[int, int, int],
    ) -> None:
        """Takes the result of a test.

        Args:
            critical_batch: B_crit.
            interval: its confidence interval.
            noise_scale: B_simple.
            spent: samples that the test cost.
            position: samples, steps and epochs of training before it.
        """
        self.spent += spent
        self._tested = position
        low, high = interval
        if not (math.isfinite(noise_scale) and noise_scale > 0):
            return
        if low > 0 and math.isfinite(high):
            self.ratio = critical_batch / noise_scale
        else:
            self.ratio = min(max(self.ratio, low / noise_scale), high / noise_scale)

    def state_dict(self) -> dict[str, Any]:
        """The ratio, what tests have cost, when the last one was, and the state of the policy."""
        inner = stateful_part(self.policy)
        return {
            "ratio": self.ratio,
            "spent": self.spent,
            "tested": None if self._tested is None else list(self._tested),
            "policy": None if inner is None else inner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self.ratio, self.spent = state["ratio"], state["spent"]
        self._tested = None if state["tested"] is None else tuple(state["tested"])
        inner = stateful_part(self.policy)
        if inner is not None and state["policy"] is not None:
            inner.load_state_dict(state["policy"])


def _growth(text: str) -> Fraction | None:
    """The growth that a percentage stands for; None for another text."""
    number, percent, rest = text.partition("%")
    try:
        growth = Fraction(number.strip()) / 100
    except (ValueError, ZeroDivisionError):
        return None
    return growth if percent and not rest.strip() and growth > 0 else None


def _with_noise(statistics: GradientStatistics, ratio: float) -> GradientStatistics:
    """Statistics with so many times the noise, in the interval too."""
    interval = statistics.interval
    if interval is not None:
        low, high = (_x_with_noise(x, ratio) for x in (interval.low, interval.high))
        interval = replace(interval, low=low, high=high)
    return replace(statistics, grad_variance=ratio * statistics.grad_variance, interval=interval)


def _x_with_noise(x: float, ratio: float) -> float:
    """ln(1 + N signal / (ratio noise)) for x = ln(1 + N signal / noise)."""
    if x > 700:
        return x - math.log(ratio)
    total = 1 + math.expm1(x) / ratio
    return math.log(total) if total > 0 else -math.inf
