"""The sizes of a branch test, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.setting_types import In
from bigbatch.statistics.critical_batch import curve_points

DEFAULT_REPEATS = 6

Repeats = Annotated[int, In("[2, inf)", "since an interval needs a scatter")]

_MULTIPLES = (0.5, 1.0, 2.0, 4.0)  # of the present batch size, by default
_FORWARD = 1 / 3  # cost of a forward alone, as a share of forward and backward
_FEWEST_STEPS = 4  # of the largest batch, by default
_MOST_STEPS = 16


@dataclass(frozen=True)
class BranchPlan:
    """The sizes of a branch test, all over all ranks."""

    batch_sizes: tuple[int, ...]  # batch size of each branch, increasing
    samples: int  # samples that each branch trains on
    repeats: int  # repeats, each with other samples
    held_aside: int  # samples on which the losses of a repeat are compared

    def points(self, batch_size: int) -> list[int]:
        """The steps after which a branch is evaluated."""
        return curve_points(self.samples // batch_size, self.samples // self.batch_sizes[-1])

    @property
    def read(self) -> int:
        """Samples that are read from the loader."""
        return self.repeats * (self.samples + self.held_aside)

    @property
    def cost(self) -> int:
        """Samples of forward and backward; an evaluation counts a third of its samples."""
        trained = sum(self.samples // size * size for size in self.batch_sizes)
        evaluations = 1 + sum(len(self.points(size)) for size in self.batch_sizes)
        return math.ceil(self.repeats * (trained + _FORWARD * evaluations * self.held_aside))


@dataclass(frozen=True)
class BranchRequest:
    """What the caller asks for; None for the default."""

    batch_sizes: Sequence[int] | None = None
    samples: int | None = None
    repeats: int = DEFAULT_REPEATS
    held_aside: int | None = None  # as in `BranchPlan`

    def plan(self, batch_size: int, ranks: int, average: int, available: int | None) -> BranchPlan:
        """The sizes of the test: by default as long as the available samples allow.

        No branch has fewer steps than the optimizer averages over (`averaging_steps`).
        """
        sizes = self._sizes(batch_size, ranks)
        largest = sizes[-1]
        if self.samples is None:
            fewest = max(_FEWEST_STEPS, average)
            steps = range(max(_MOST_STEPS, 2 * fewest), fewest - 1, -1)
            lengths = [largest * each for each in steps]
        elif self.samples // largest >= (fewest := max(2, average)):
            lengths = [self.samples]
        else:
            averages = f", and the optimizer averages over {fewest}" * (fewest > 2)
            raise SettingError(
                f"samples={self.samples} are {self.samples // largest} steps of the largest batch, "
                f"{largest}{averages}; pass samples={fewest * largest} or more, or smaller "
                "batch_sizes"
            )
        for samples in lengths:
            samples -= samples % ranks
            held_aside = max(1, samples // 2) if self.held_aside is None else self.held_aside
            held_aside = -(-held_aside // ranks) * ranks
            plan = BranchPlan(sizes, samples, self.repeats, held_aside)
            if available is None or plan.read <= available:
                return plan
        raise SettingError(
            f"a branch test of batches {list(sizes)} with samples={plan.samples}, repeats="
            f"{plan.repeats} and held_aside={plan.held_aside} reads {plan.read} samples, and "
            f"{available} are left in this pass; call it earlier in a pass, or pass smaller sizes"
        )

    def _sizes(self, batch_size: int, ranks: int) -> tuple[int, ...]:
        if self.batch_sizes is None:
            rows = [max(1, round(multiple * batch_size / ranks)) for multiple in _MULTIPLES]
            return tuple(sorted({ranks * row for row in rows}))
        sizes = tuple(sorted(set(self.batch_sizes)))
        if len(sizes) < 2:
            raise SettingError(
                f"batch_sizes={list(self.batch_sizes)} is one size, and branches are compared; "
                f"pass at least two, {[sizes[0], 4 * sizes[0]] if sizes else [32, 128]} for example"
            )
        if uneven := [size for size in sizes if size % ranks]:
            near = max(ranks, round(uneven[0] / ranks) * ranks)
            raise SettingError(
                f"batch_sizes={list(sizes)}: {uneven[0]} samples cannot be shared evenly by "
                f"{ranks} ranks; pass multiples of {ranks}, {near} for example"
            )
        return sizes


def averaging_steps(optimizer: Optimizer) -> int:
    """The most steps over which the optimizer averages gradients: 1 / (1 - momentum or beta1).

    Averages of squares (beta2) are left out: see docs/decisions/0018.
    """
    groups = optimizer.param_groups
    shares = [group.get("momentum") or 0 for group in groups]
    shares += [(group.get("betas") or (0,))[0] for group in groups]
    longest = max((1 / (1 - float(b)) for b in shares if 0 < float(b) < 1), default=1)
    return math.ceil(round(longest, 6))  # 1 / (1 - 0.9) is not quite 10
