"""Rounds a batch size to ranks x micro-batch x accumulation; nothing else in the package rounds."""

from dataclasses import dataclass

from bigbatch.errors import SettingError
from bigbatch.setting_types import Count, checked


@checked
@dataclass(frozen=True)
class BatchPlan:
    """An optimizer step in which every rank runs `accumulation` backwards of `micro` samples.

    Args:
        ranks: processes that share the step.
        micro: samples in one backward on one rank.
        accumulation: backwards per step and rank.
    """

    ranks: Count
    micro: Count
    accumulation: Count

    @property
    def batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.ranks * self.micro * self.accumulation

    @property
    def micro_batches(self) -> int:
        """k, the number of micro-batch gradients in a step over all ranks."""
        return self.ranks * self.accumulation

    @classmethod
    @checked
    def fit(
        cls,
        batch_size: Count,
        ranks: Count = 1,
        *,
        max_micro: Count,
        min_micro_batches: Count = 1,
        min_accumulation: Count = 1,
        min_batch: Count = 1,
        max_batch: Count | None = None,
        micro: Count | None = None,
    ) -> "BatchPlan":
        """The smallest accumulation that can reach `batch_size`, then the nearest micro-batch.

        A `batch_size` outside [min_batch, max_batch] is first moved to the nearer bound. The plan's
        size is always within the bounds. Where they allow it, it differs from `batch_size` by less
        than one quantum: ranks x accumulation samples, or ranks x micro where `micro` is fixed.

        Args:
            batch_size: samples per optimizer step over all ranks.
            ranks: processes that share the step.
            max_micro: most samples that one backward can hold.
            min_micro_batches: lower bound of ranks x accumulation.
            min_accumulation: lower bound of the accumulation.
            min_batch: lower bound in samples; it may be below the smallest possible step.
            max_batch: upper bound in samples; None for none.
            micro: the micro-batch size, where it is fixed.
        Raises:
            SettingError: a size is not a positive whole number, the bounds are crossed, or no
                plan lies between them.
        Example:
            >>> BatchPlan.fit(6000, 4, max_micro=512)
            BatchPlan(ranks=4, micro=500, accumulation=3)
        """
        require_bounds(min_batch, max_batch)
        if micro is not None and micro > max_micro:
            raise SettingError(f"micro={micro} exceeds max_micro={max_micro}; raise max_micro")
        target, bounds = clamp(batch_size, min_batch, max_batch), (min_batch, max_batch)
        lowest = max(min_accumulation, -(-min_micro_batches // ranks))
        if micro is None:
            lowest = max(lowest, -(-target // (ranks * max_micro)))
            for accumulation in range(lowest, max(lowest, (max_batch or target) // ranks) + 1):
                factor = _nearest_factor(target, ranks * accumulation, 1, max_micro, *bounds)
                if factor is not None:
                    return cls(ranks, factor, accumulation)
        else:
            factor = _nearest_factor(target, ranks * micro, lowest, None, *bounds)
            if factor is not None:
                return cls(ranks, micro, factor)
        raise SettingError(
            f"no batch size between min_batch={min_batch} and max_batch={max_batch} can be cut "
            f"into ranks={ranks} x at least {lowest} micro-batches of "
            f"{f'{micro}' if micro else f'at most {max_micro}'}; widen the bounds, or lower "
            "min_micro_batches or micro_batch (the loader's batch size)"
        )


@dataclass(frozen=True)
class PlanConstraints:
    """Constraints on every plan of a training."""

    virtual_ranks: int  # ranks that share a step
    micro_batch: int  # most samples in one backward
    fixed_micro_batch: bool  # whether every backward has that many
    min_micro_batches: int  # fewest of a measured step, over all ranks
    groups: int | None = None  # groups in a backward, each of which is a micro-batch

    def reachable(self, batch_size: int, max_batch: int | None) -> int:
        """A batch size that every later plan can keep as a lower bound: this one if it can be."""
        size = clamp(batch_size, 1, max_batch)
        try:
            self.plan(size, size, max_batch)
        except SettingError:  # no cut is between both
            return self.plan(size, 1, max_batch).batch_size
        return size

    def plan(
        self, batch_size: int, min_batch: int, max_batch: int | None, *, compared: bool = True
    ) -> BatchPlan:
        """The plan for a batch size."""
        backwards = -(-self.min_micro_batches // (self.groups or 1)) if compared else 1
        if self.groups and compared:
            min_batch = max(min_batch, self.min_micro_batches)  # samples, one of each group
        return BatchPlan.fit(
            batch_size,
            self.virtual_ranks,
            max_micro=self.micro_batch,
            min_micro_batches=backwards,
            min_batch=min_batch,
            max_batch=max_batch,
            micro=self.micro_batch if self.fixed_micro_batch else None,
        )


def require_bounds(min_batch: int | None, max_batch: int | None) -> None:
    """Raises SettingError if the lower bound exceeds the upper one; None is no bound."""
    if min_batch is not None and max_batch is not None and min_batch > max_batch:
        raise SettingError(
            f"min_batch={min_batch} exceeds max_batch={max_batch}; swap them or raise max_batch"
        )


def clamp(number: int, low: int, high: int | None) -> int:
    """The nearest number within the bounds; None is no bound."""
    number = max(number, low)
    return number if high is None else min(number, high)


def _nearest_factor(
    target: int, quantum: int, low: int, high: int | None, min_batch: int, max_batch: int | None
) -> int | None:
    """The factor in [low, high] with quantum x factor nearest to the target, halves down.

    None if no product of such a factor is within [min_batch, max_batch].
    """
    low = max(low, -(-min_batch // quantum))
    if max_batch is not None:
        high = clamp(max_batch // quantum, 0, high)
    factor = clamp(-((quantum - 2 * target) // (2 * quantum)), low, high)
    return factor if factor >= low else None
