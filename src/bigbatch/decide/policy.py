"""Batch-size policies: (noise, now) -> Decision, each a small class with one method."""

import math
from dataclasses import dataclass
from typing import Protocol

from bigbatch.decide.plan import require_ordered, require_positive
from bigbatch.errors import SettingError
from bigbatch.measure.noise import GradientNoise


@dataclass(frozen=True)
class Decision:
    """What the next step should be.

    Args:
        batch_size: samples per optimizer step over all ranks, before any rounding.
        reason: why, in words for a log.
        lr_factor: multiplies the learning rate on top of what the batch size asks for.
    Raises:
        SettingError: a batch size below 1, or a factor that is negative or not finite.
    """

    batch_size: int
    reason: str
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size)
        if not (math.isfinite(self.lr_factor) and self.lr_factor >= 0):
            raise SettingError(f"lr_factor={self.lr_factor} must be finite and not negative")


@dataclass(frozen=True)
class Progress:
    """Where a training stands when a policy is asked.

    Args:
        target: batch size that was last decided, not rounded to what can be cut.
        batch_size: samples of the step just measured.
        base_batch: batch size that the learning rate was tuned for.
        samples: samples consumed so far, the present step included.
        steps: optimizer steps so far, the present one included.
        epoch: passes over the data completed.
        ranks: processes that share a step.
        lr: learning rate that the present step used, one per parameter group.
        seconds: time spent training so far.
    """

    target: int
    batch_size: int
    base_batch: int
    samples: int = 0
    steps: int = 0
    epoch: int = 0
    ranks: int = 1
    lr: tuple[float, ...] = ()
    seconds: float = 0.0


class Policy(Protocol):
    """Anything with this method; `min_batch` and `max_batch` are honoured where it has them."""

    def decide(self, noise: GradientNoise, now: Progress) -> Decision:
        """The next batch size."""


@dataclass(frozen=True)
class Fixed:
    """Keeps one batch size whatever is measured."""

    batch_size: int

    def __post_init__(self) -> None:
        require_positive(batch_size=self.batch_size)

    def decide(self, noise: GradientNoise, now: Progress) -> Decision:
        """The same batch size again."""
        return Decision(self.batch_size, "fixed")


@dataclass(frozen=True)
class SimiGrad:
    """Grows or shrinks the batch so that its gradient similarity stays at a target.

        phi < target:             B <- max(B + 1, int(grow B))
        phi > target and B > 1:   B <- max(1, min(B - 1, int(shrink B)))
        phi = target, or not finite: B stays

    then B is moved into [min_batch, max_batch]. The fixed point is B = B_simple 2 phi / (1 - phi).

    Args:
        target: similarity to hold, inside (-1, 1).
        min_batch: lower bound in samples.
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

    target: float = 0.2
    min_batch: int = 1
    max_batch: int | None = None
    grow: float = 1.1
    shrink: float = 0.9

    def __post_init__(self) -> None:
        if not -1 < self.target < 1:
            raise SettingError(f"target={self.target} must lie inside (-1, 1): it is a cosine")
        require_positive(min_batch=self.min_batch)
        if self.max_batch is not None:
            require_positive(max_batch=self.max_batch)
        require_ordered(self.min_batch, self.max_batch)
        if not 1 < self.grow < math.inf:
            raise SettingError(f"grow={self.grow} must be above 1")
        if not 0 < self.shrink < 1:
            raise SettingError(f"shrink={self.shrink} must lie inside (0, 1)")

    def next_batch(self, similarity: float, batch_size: int) -> int:
        """The paper's rule itself, bounds included."""
        if not math.isfinite(similarity):
            pass
        elif similarity < self.target:
            batch_size = max(batch_size + 1, int(self.grow * batch_size))
        elif similarity > self.target and batch_size > 1:
            batch_size = max(1, min(batch_size - 1, int(self.shrink * batch_size)))
        highest = batch_size if self.max_batch is None else self.max_batch
        return max(self.min_batch, min(batch_size, highest))

    def decide(self, noise: GradientNoise, now: Progress) -> Decision:
        """Applies the rule to the un-rounded batch size that was decided last."""
        phi = noise.similarity
        if not math.isfinite(phi):
            order = "not finite, target"
        else:
            order = "<" if phi < self.target else ">" if phi > self.target else "="
        reason = f"similarity {phi:.3f} {order} {self.target:g}"
        return Decision(self.next_batch(phi, now.target), reason)
