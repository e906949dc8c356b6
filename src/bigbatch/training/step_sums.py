"""What the host reads of a step: its sums over all ranks, in one wait."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.data.rank_consistency import CHECKSUM_SUMS, LOSS_TOLERANCE
from bigbatch.gradients import GradientSource
from bigbatch.gradients.auto import is_sharded
from bigbatch.gradients.dtypes import stacked, to_device, widest_float, without_autocast
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


# [Note: A step that measures nothing]
# It is light: its gradients are looked at once, for the skipping of a step that is not finite.
# Nothing is planned or decided, and in one process nothing is weighed: the mean of one backward
# over its labels needs no factor, so they are not counted. What the host reads, the loss, can wait
# until the end of the step, for one wait in all. Where the optimizer skips a step on the device
# (torch's fused ones read `found_inf`), it waits until the next step ends: by then the device is
# past it. `Update.settle` does everything that depends on it, before anything else reads what the
# step has changed.
# Under DDP all ranks have the same mean gradient, so each sees by itself whether it is finite. What
# else they sum is known before the last backward, and is sent while that runs.


@dataclass
class StepStatistics:
    """Everything that a decision rests on, read from the step's gradients; equal on all ranks."""

    samples: int  # samples of the step, over all ranks
    micro_batches: int  # backwards of the step, over all ranks
    elapsed_seconds: float  # time spent training so far, mean over the ranks
    previous_seconds: float  # time of the step before, mean over the ranks; 0 if unknown
    ranks_agree: bool = True  # whether their checksums of what decides a step are equal
    # what the host may read later
    statistics: GradientStatistics | None = None  # None if it could not be measured
    loss: float = math.nan  # mean loss over the batch
    finite: bool = True  # whether every gradient is finite
    vanishes: bool = False  # whether every gradient is zero
    weight_per_sample: float | None = None  # mean weight of a sample; None if it is unknown


class StepSums:
    """Sums of one step over all ranks, on the device until the host reads them in one wait.

    `counts` is what this rank knows: [weight, micro-batches, weighting, samples, has gradient,
    seconds of the step before, seconds spent training, *checksum sums]. `summed` waits for the
    `local_totals` of all ranks, if they were sent before. `found_inf` is 1 where the optimizer
    skips the step; None if the host decides that.
    """

    def __init__(
        self,
        meter: GradientMeter,
        losses: list[Tensor],
        weights: list[float],
        counts: list[float],
        *,
        is_light: bool,
        summed: Callable[[], Tensor] | None,
        found_inf: Tensor | None,
        pair_sums: Tensor | None,
    ) -> None:
        self.counts, self.found_inf = counts, found_inf
        self._weights, self._processes = weights, meter.source.processes
        # how many of `values` are the losses of this process, or the totals of several
        is_group = self._processes > meter.source.ranks
        self.head = len(weights) if self._processes == 1 else 8 + CHECKSUM_SUMS + is_group
        self.values: list[float] = []  # then the meter's, or the checks of a light step; once read
        source, device = meter.source, meter.source.parameters[0].device
        self._copied: torch.Event | None = None
        if not is_light:
            if self._processes > 1:
                first = local_totals(source, losses, weights, counts)
            else:  # which knows its counts, and weighs the losses once it has read them
                first = to_device(torch.stack(losses), device)
            if pair_sums is not None:
                first = torch.cat([first, pair_sums])
            self._device_values = meter.measure(weights, first)
            return
        if found_inf is not None:
            checks: Sequence[Tensor] = [found_inf]
        else:
            grads = _local_grads(source)
            checks = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]
        if summed is None:
            self._device_values = stacked([*losses, *checks])
        else:
            of_rank = stacked(checks)
            of_ranks = summed()
            self._device_values = torch.cat([of_ranks, of_rank.to(of_ranks.dtype)])
        if found_inf is not None and device.type != "cpu":  # now, as the next step's work is queued
            self._device_values = self._device_values.to("cpu", non_blocking=True)
            self._copied = torch.Event(device.type)
            self._copied.record()

    def read(self) -> list[float]:
        """[weight * loss, *counts], summed over all ranks."""
        if not self.values:
            if self._copied is not None:
                self._copied.synchronize()
            self.values = self._device_values.tolist()
        if self._processes > 1:
            return self.values[: self.head]
        return [weighted_sum(self._weights, self.values), *self.counts]


def _local_grads(source: GradientSource) -> list[Tensor]:
    """The gradients without a graph, which a backward with create_graph leaves."""
    grads = source.local_grads()
    return [grad.detach() for grad in grads] if any(map(_REQUIRES_GRAD, grads)) else grads


def found_inf_of(source: GradientSource, nan_loss: Tensor | None) -> Tensor | None:
    """1 on the device if a gradient is not finite, or `nan_loss`, a mean over labels, has none.

    None if the gradients are of several types or devices, which one call cannot check.
    """
    grads = _local_grads(source)
    if len({(grad.dtype, grad.device) for grad in grads}) != 1:
        return None
    device = source.parameters[0].device
    if nan_loss is not None:  # infinite where it is nan
        grads = [*grads, nan_loss.to(grads[0].dtype).nan_to_num(math.inf, 0.0, 0.0)]
    found_inf, one = torch.zeros((), device=device), torch.ones((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, one)
    return found_inf


def weighted_sum(weights: Iterable[float], losses: Iterable[float]) -> float:
    """The sum of weight * loss; nan of infinite losses of both signs."""
    products = [*map(operator.mul, weights, losses)]
    try:
        return math.fsum(products)
    except (OverflowError, ValueError):
        return float(sum(products))


def local_totals(
    source: GradientSource, losses: list[Tensor], weights: list[float], counts: list[float]
) -> Tensor:
    """[weight * loss, *counts] of this rank, to be summed over the ranks.

    The first process of a tensor-parallel group adds what all of them know, and one number more:
    whether their losses differ. See [Note: Tensor parallelism].
    """
    if source.processes == source.ranks:
        return _totals(source, losses, weights, counts)
    totals = _totals(source, list(map(_whole, losses)), weights, counts)
    size, loss = source.processes // source.ranks, totals[:1]
    moments = torch.cat([loss, loss.square()])
    source.reducer.sum_slices(moments)
    mean, square = moments / size
    differ = square - mean.square() > (LOSS_TOLERANCE * mean).square()
    shared = torch.cat([totals[:8], differ[None].to(totals)]) * source.is_first
    return torch.cat([shared[:8], totals[8:], shared[8:]])


def loss_sum(weights: Iterable[float], losses: Iterable[Tensor]) -> float:
    """The sum of weight * loss of this process."""
    return weighted_sum(weights, [float(_whole(loss)) for loss in losses])


def _whole(loss: Any) -> Tensor:
    """A loss as a plain tensor; of `loss_parallel` it is a DTensor."""
    tensor: Tensor = loss.full_tensor() if is_sharded(loss) else loss
    return tensor


def _totals(
    source: GradientSource, losses: list[Tensor], weights: list[float], counts: list[float]
) -> Tensor:
    device = source.parameters[0].device
    k, dtype = len(weights), widest_float(device)
    if device.type == "cpu":
        total = weighted_sum(weights, map(float, losses))
        return torch.tensor([total, *counts], dtype=dtype)
    numbers = torch.tensor([*weights, *counts], dtype=dtype, device="cpu")
    numbers = to_device(numbers, device)
    if not losses:
        return torch.cat([numbers.new_zeros(1), numbers])
    with without_autocast(device):
        loss = numbers[:k] @ to_device(torch.stack(losses), device, dtype)
    return torch.cat([loss[None], numbers[k:]])
