"""The only place that rounds: a wanted batch size becomes ranks x micro-batch x accumulation."""

from dataclasses import dataclass

from bigbatch.errors import SettingError
from bigbatch.setting_types import Count, checked


@checked
@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut: every rank does `accumulation` backwards of `micro` samples.

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
        """k, the gradients that one step can compare."""
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

        The result is inside [min_batch, max_batch] always, and less than one quantum (ranks x
        accumulation samples; ranks x micro where `micro` is fixed) away from what was wanted,
        wherever the bounds allow it. A wanted size outside the bounds is first moved to them.

        Args:
            batch_size: samples wanted per optimizer step over all ranks.
            ranks: processes that share the step.
            max_micro: most samples that one backward can hold.
            min_micro_batches: least ranks x accumulation.
            min_accumulation: least accumulation.
            min_batch: lower bound in samples. One below the smallest possible step is no error.
            max_batch: upper bound in samples; None for none.
            micro: the micro-batch size, where it may not be chosen.
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
        wanted = inside(batch_size, min_batch, max_batch)
        first = max(min_accumulation, -(-min_micro_batches // ranks))
        if micro is None:
            first = max(first, -(-wanted // (ranks * max_micro)))
            plan = cls._free_micro(wanted, ranks, max_micro, first, min_batch, max_batch)
        else:
            plan = cls._fixed_micro(wanted, ranks, micro, first, min_batch, max_batch)
        if plan is None:
            raise SettingError(
                f"no batch size between min_batch={min_batch} and max_batch={max_batch} can be cut "
                f"into ranks={ranks} x at least {first} micro-batches of "
                f"{f'{micro}' if micro else f'at most {max_micro}'}; widen the bounds"
            )
        return plan

    @classmethod
    def _free_micro(
        cls,
        wanted: int,
        ranks: int,
        max_micro: int,
        first: int,
        min_batch: int,
        max_batch: int | None,
    ) -> "BatchPlan | None":
        most = max(first, (max_batch or wanted) // ranks)
        for accumulation in range(first, most + 1):
            quantum = ranks * accumulation
            lowest = max(1, -(-min_batch // quantum))
            highest = min(max_micro, max_batch // quantum) if max_batch else max_micro
            if lowest <= highest:
                micro = min(max(_nearest(wanted, quantum), lowest), highest)
                return cls(ranks, micro, accumulation)
        return None

    @classmethod
    def _fixed_micro(
        cls, wanted: int, ranks: int, micro: int, first: int, min_batch: int, max_batch: int | None
    ) -> "BatchPlan | None":
        quantum = ranks * micro
        lowest = max(first, -(-min_batch // quantum))
        accumulation = max(_nearest(wanted, quantum), lowest)
        if max_batch is not None:
            accumulation = min(accumulation, max_batch // quantum)
        return cls(ranks, micro, accumulation) if accumulation >= lowest else None


def require_bounds(min_batch: int, max_batch: int | None) -> None:
    """Raises SettingError where the bounds are crossed; None is no bound."""
    if max_batch is not None and min_batch > max_batch:
        raise SettingError(
            f"min_batch={min_batch} exceeds max_batch={max_batch}; swap them or raise max_batch"
        )


def inside(batch_size: int, min_batch: int, max_batch: int | None) -> int:
    """The size nearest to `batch_size` within the bounds."""
    batch_size = max(batch_size, min_batch)
    return batch_size if max_batch is None else min(batch_size, max_batch)


def _nearest(wanted: int, quantum: int) -> int:
    """wanted / quantum to the nearest whole number, halves down."""
    return -((quantum - 2 * wanted) // (2 * quantum))
