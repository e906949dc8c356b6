"""What the ranks add up at the end of a step: one packed vector, one all-reduce, one host read."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import to_device, widest_float

Vector = TypeVar("Vector", Tensor, list[float])

_ALONE = 1e-4  # of .grad against what was seen, relative, in one process
_REDUCED = 2**-8  # rounding of bfloat16, in which engines may reduce, once a rank
_EQUAL = 1e-3  # squared norms of one tensor on several ranks, whose kernels may differ


@dataclass(frozen=True)
class OfRank:
    """What one rank says of its own part of a step.

    Args:
        micro_batches, samples: k and N of this rank.
        failed: 1 where this rank could not take part.
        squares: sum |h_d|^2.
        numbered: sum (d + 1) |h_d|^2, which tells equal micro-batches apart.
        not_finite: number of the first micro-batch that is not, from 1; 0 for none.
        of_grad: |.grad|^2 of what this rank holds.
    """

    micro_batches: float
    samples: float
    failed: float
    squares: float
    numbered: float
    not_finite: float
    of_grad: float


FIELDS = len(fields(OfRank))


class StepTotals:
    """The totals of a step on the host, over all ranks.

    Attributes:
        over_sizes, squares, total_sqnorm: sums of |h_d|^2 / n_d, of |h_d|^2; |.grad|^2; by layer.
        inverse_sizes: sum 1 / n_d.
        slope: covariance and variance sums of ln |h_d|^2 over ln n_d.
        scale: of a GradScaler.
        left_out: sums of x_d and of x_d^2 (interval.py); nan if not asked for.
        half_batch: |Z|^2 and .grad . Z (half_batch_cosine.py); nan if not asked for.
        of_ranks: what each rank said of itself.
        micro_batches, samples: k and N.
    """

    def __init__(self, parts: Mapping[str, list[float]]) -> None:
        self.over_sizes, self.squares = parts["sqnorms_over_sizes"], parts["sqnorms"]
        self.total_sqnorm = parts["grad_sqnorms"]
        self.slope = _pair(parts["slope"])
        (self.inverse_sizes,), (self.scale,) = parts["inverse_sizes"], parts["scale"]
        self.left_out = _pair(parts.get("leave_one_out"))
        self.half_batch_cosine = _pair(parts.get("half_batch"))
        self._seen, self._in_grad = parts["micro_batch_projections"], parts["grad_projections"]
        (self._probed,) = parts["projection_sqnorm"]
        slots = parts["ranks"]
        self.of_ranks = [OfRank(*slots[i : i + FIELDS]) for i in range(0, len(slots), FIELDS)]
        self.micro_batches = round(sum(rank.micro_batches for rank in self.of_ranks))
        self.samples = math.fsum(rank.samples for rank in self.of_ranks)

    @property
    def finite(self) -> bool:
        """Whether every squared norm is."""
        return all(map(math.isfinite, [*self.squares, *self.total_sqnorm]))

    def require_all_took_part(self) -> None:
        """Raises GradientError on every rank where one of them could not read its step."""
        failed = [number for number, rank in enumerate(self.of_ranks) if rank.failed]
        if failed:
            raise GradientError(f"rank {_listed(failed)} could not read its step: see its error")

    def reduction(self, eps: float, replicated: bool) -> float:
        """c with `.grad` = c * (sum of h_d over all ranks): 1/W for a mean over ranks, 1 for a sum.

        Raises:
            GradientError: `.grad` is neither, or differs between ranks that should hold the same.
        """
        ranks = len(self.of_ranks)
        of_grad = [rank.of_grad for rank in self.of_ranks]
        if replicated and max(of_grad) - min(of_grad) > _EQUAL * max(of_grad):
            raise GradientError(
                f".grad differs between ranks (squared norms {_listed(of_grad)}): the last "
                "backward of the step ran under no_sync, or not on the DDP model's own output"
            )
        errors = {c: math.dist(self._in_grad, [c * x for x in self._seen]) for c in (1 / ranks, 1)}
        c = min(errors, key=lambda c: errors[c])
        most = max(rank.micro_batches for rank in self.of_ranks)
        tolerance = max(_ALONE, eps * (1 + math.sqrt(most)))
        if ranks > 1:
            tolerance = max(tolerance, _REDUCED * (1 + math.sqrt(ranks)))
        if errors[c] > tolerance * c * (math.hypot(*self._seen) + math.sqrt(self._probed)):
            raise GradientError(
                f".grad is not the sum of the {self.micro_batches} micro-batch gradients that were "
                f"seen, nor their mean over {ranks} ranks: projected on one direction, it is "
                f"{self._in_grad[0]:.3g} and they are {self._seen[0]:.3g}; read before unscale_, "
                "clipping and step(), let every backward be seen, and compress nothing"
            )
        return c


def pack(parts: Mapping[str, Tensor]) -> Tensor:
    """All parts in one vector, on the device of the first; nothing waits."""
    device = next(iter(parts.values())).device
    return torch.cat(
        [to_device(part.reshape(-1), device, widest_float(device)) for part in parts.values()]
    )


def unpack(values: Vector, lengths: Mapping[str, int]) -> dict[str, Vector]:
    """The parts of a packed vector, on the device or after the host has read it."""
    ends = itertools.accumulate(lengths.values())
    pairs = zip(lengths.items(), ends, strict=True)
    return {name: values[end - length : end] for (name, length), end in pairs}


def _pair(values: list[float] | None) -> tuple[float, float]:
    return (values[0], values[1]) if values else (math.nan, math.nan)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
