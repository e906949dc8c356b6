"""What the host reads of a step: its sums over all ranks, in one wait."""

import math
import operator
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import to_device, widest_float, without_autocast
from bigbatch.statistics.meter import GradientMeter


class MeasuredStep:
    """Totals of one step over all ranks, on the device until the host reads them in one wait.

    Args:
        meter: measures the gradients, complete.
        losses: the mean loss of each micro-batch that counts.
        weights: n_d of each.
        counts: what this rank knows: [weight, micro-batches, weighting, samples, has gradient,
            seconds of the step before, seconds spent training, checksum].
    """

    def __init__(
        self, meter: GradientMeter, losses: list[Tensor], weights: list[float], counts: list[float]
    ) -> None:
        self.counts, self._source, self._weights = counts, meter.source, weights
        device = self._source.parameters[0].device
        if self._source.ranks > 1:
            extra: Tensor | None = local_totals(self._source, losses, weights, counts)
        else:  # which knows its counts, and weighs the losses once it has read them
            extra = to_device(torch.stack(losses), device) if losses else None
        self._device_totals = meter.measure(weights, extra)

    @cached_property
    def values(self) -> list[float]:
        """What was summed on the device; reading it is the one wait for the device in a step."""
        values: list[float] = self._device_totals.tolist()
        return values

    @cached_property
    def host_totals(self) -> list[float]:
        """[weight * loss, *counts], over all ranks; the seconds and the checksum are of each."""
        if self._source.ranks > 1:
            return self.values[: 1 + len(self.counts) + 2 * (self._source.ranks - 1)]
        losses = self.values[: len(self._weights)]
        return [weighted_sum(self._weights, losses), *self.counts]


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

    The last two are messages: zeros stand where those of other ranks are added.
    """
    device = source.parameters[0].device
    k, dtype = len(weights), widest_float(device)
    *counts, seconds, checksum = counts
    messages = [0.0] * (2 * source.ranks)
    messages[2 * source.rank : 2 * source.rank + 2] = seconds, checksum
    if device.type == "cpu":
        total = weighted_sum(weights, map(float, losses))
        return torch.tensor([total, *counts, *messages], dtype=dtype)
    numbers = torch.tensor([*weights, *counts, *messages], dtype=dtype, device="cpu")
    numbers = to_device(numbers, device)
    if not losses:
        return torch.cat([numbers.new_zeros(1), numbers])
    with without_autocast(device):
        loss = numbers[:k] @ to_device(torch.stack(losses), device, dtype)
    return torch.cat([loss[None], numbers[k:]])
