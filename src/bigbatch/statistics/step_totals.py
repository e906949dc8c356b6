"""Totals of a step over all ranks: one packed vector, one all-reduce, one host read."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import Tensor

from bigbatch.errors import GradientError

Vector = TypeVar("Vector", Tensor, list[float])

_ONE_PROCESS_TOLERANCE = 1e-4  # relative difference of .grad and the micro-batches' sum
_BFLOAT16_ROUNDING = 2**-8  # once per rank, since engines may reduce in bfloat16
_REPLICA_TOLERANCE = 1e-3  # squared norms of one tensor on several ranks, whose kernels may differ


@dataclass(frozen=True)
class RankTotals:
    """The totals of one rank."""

    micro_batches: float
    samples: float  # k and N of this rank
    failed: float  # 1 where this rank could not take part
    sqnorm_sum: float  # sum |h_d|^2
    numbered_sqnorm_sum: float  # sum (d + 1) |h_d|^2; differs if micro-batches swap places
    first_nonfinite: float  # number of the first micro-batch that is not finite, from 1
    grad_sqnorm: float  # |.grad|^2 of this rank's shards


class StepTotals:
    """The totals of a step on the host, over all ranks."""

    def __init__(self, parts: Mapping[str, list[float]]) -> None:
        self.sqnorms_over_sizes = parts["sqnorms_over_sizes"]  # sum |h_d|^2 / n_d, by layer
        self.sqnorms = parts["sqnorms"]  # sum |h_d|^2, by layer
        self.grad_sqnorms = parts["grad_sqnorms"]  # |.grad|^2, by layer
        self.slope = _pair(parts["slope"])  # of ln |h_d|^2 over ln n_d: covariance, variance
        (self.inverse_sizes,) = parts["inverse_sizes"]  # sum 1 / n_d
        (self.scale,) = parts["scale"]  # of a GradScaler
        (self.group_error,) = parts.get("group_error", [0.0])  # of gradients to sums of groups
        self.leave_one_out = _pair(parts.get("leave_one_out"))  # sums of x_d and x_d^2, or nan
        self.half_batch_cosine = _pair(parts.get("half_batch"))  # |Z|^2 and .grad . Z, or nan
        self._micro_batch_projections = parts["micro_batch_projections"]
        self._grad_projections = parts["grad_projections"]
        (self._projection_sqnorm,) = parts["projection_sqnorm"]
        ranks = len(parts["ranks"]) // len(fields(RankTotals))  # a column for each
        self.ranks = [RankTotals(*parts["ranks"][i::ranks]) for i in range(ranks)]
        self.micro_batches = round(sum(rank.micro_batches for rank in self.ranks))
        self.samples = math.fsum(rank.samples for rank in self.ranks)

    @property
    def is_finite(self) -> bool:
        """Whether every squared norm is finite."""
        return all(map(math.isfinite, [*self.sqnorms, *self.grad_sqnorms]))

    def require_all_took_part(self) -> None:
        """Raises GradientError on every rank if one of them could not read its step."""
        failed_ranks = [number for number, rank in enumerate(self.ranks) if rank.failed]
        if failed_ranks:
            raise GradientError(
                f"rank {_join_numbers(failed_ranks)} could not read its step: see its error"
            )

    def reduction(self, eps: float, replicated: bool) -> float:
        """c with `.grad` = c * (sum of h_d over all ranks): 1/W for a mean over ranks, 1 for a sum.

        Raises:
            GradientError: `.grad` is neither, or differs between ranks that should hold the same.
        """
        ranks = len(self.ranks)
        grad_sqnorms = [rank.grad_sqnorm for rank in self.ranks]
        largest = max(grad_sqnorms)
        if replicated and largest - min(grad_sqnorms) > _REPLICA_TOLERANCE * largest:
            raise GradientError(
                f".grad differs between ranks (squared norms {_join_numbers(grad_sqnorms)}): the "
                "last backward of the step ran under no_sync, or not on the DDP model's own output"
            )
        expected, actual = self._micro_batch_projections, self._grad_projections
        errors = {c: math.dist(actual, [c * x for x in expected]) for c in (1 / ranks, 1)}
        c = min(errors, key=lambda c: errors[c])
        max_micro_batches = max(rank.micro_batches for rank in self.ranks)
        tolerance = max(_ONE_PROCESS_TOLERANCE, eps * (1 + math.sqrt(max_micro_batches)))
        if ranks > 1:
            tolerance = max(tolerance, _BFLOAT16_ROUNDING * (1 + math.sqrt(ranks)))
        length = math.hypot(*expected) + math.sqrt(self._projection_sqnorm)
        if errors[c] > tolerance * c * length:
            raise GradientError(
                f".grad is not the sum of the {self.micro_batches} micro-batch gradients that were "
                f"seen, nor their mean over {ranks} ranks: projected on one direction, it is "
                f"{actual[0]:.3g} and they are {expected[0]:.3g}; read before unscale_, "
                "clipping and step(), let every backward be seen, and compress nothing"
            )
        return c


def unpack(values: Vector, lengths: Mapping[str, int]) -> dict[str, Vector]:
    """The parts of a packed vector, on the device or after the host has read it."""
    ends = itertools.accumulate(lengths.values())
    pairs = zip(lengths.items(), ends, strict=True)
    return {name: values[end - length : end] for (name, length), end in pairs}


def _pair(values: list[float] | None) -> tuple[float, float]:
    return (values[0], values[1]) if values else (math.nan, math.nan)


def _join_numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
