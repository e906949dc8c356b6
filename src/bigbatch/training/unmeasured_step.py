"""What the host reads of a step that is not measured: its loss, and whether it is finite."""

import math
import operator
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import stacked
from bigbatch.training.measured_step import weighted_sum

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


# [Note: A step that measures nothing]
# Its gradients are looked at once, for the skipping of a step that is not finite. Nothing is
# planned or decided, and in one process nothing is weighed: the mean of one backward over its
# labels needs no factor, so they are not counted. What the host reads, the loss, can wait until
# the end of the step, for one wait in all. Where the optimizer skips a step on the device (torch's
# fused ones read `found_inf`), it waits until the next step ends: by then the device is past it.
# `Update.settle` does everything that depends on it, before anything else reads what the step has
# changed.
# Under DDP all ranks have the same mean gradient, so each sees by itself whether it is finite. What
# else they sum is known before the last backward, and is sent while that runs.


class UnmeasuredStep:
    """Loss and finiteness of one step, read by the host in one wait.

    Args:
        source: the gradients, complete and equal on all ranks.
        losses: the mean loss of each micro-batch that counts.
        weights: n_d of each.
        counts: what the host knows, as `MeasuredStep` has it; on several ranks they are sent.
        may_lack_labels: whether the loss is a mean over labels, which is nan without any.
        on_device: whether the optimizer skips a step that is not finite by `found_inf`.
        summed: waits for `local_totals` of all ranks; None in one process.
    """

    def __init__(
        self,
        source: GradientSource,
        losses: list[Tensor],
        weights: list[float],
        counts: list[float],
        *,
        may_lack_labels: bool,
        on_device: bool,
        summed: Callable[[], Tensor] | None,
    ) -> None:
        self._source, self._weights, self.counts = source, weights, counts
        self._of_ranks = summed is not None
        grads = source.local_grads()
        if any(map(_REQUIRES_GRAD, grads)):  # of a backward with create_graph
            grads = [grad.detach() for grad in grads]
        self.found_inf: Tensor | None = None  # 1 where the step must be skipped
        device = source.parameters[0].device
        if not on_device or len({(grad.dtype, grad.device) for grad in grads}) != 1:
            checks = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]
        else:
            checked = [*grads, _nan_as_inf(losses[0], grads[0])] if may_lack_labels else grads
            self.found_inf = torch.zeros((), device=device)
            one = torch.ones((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(checked, self.found_inf, one)
            checks = [self.found_inf]
        self._checks = len(checks)
        if summed is None:
            self._values = stacked([*checks, *losses])
        else:
            of_ranks = summed()
            self._values = torch.cat([stacked(checks).to(of_ranks.dtype), of_ranks])
        self._copied: torch.Event | None = None
        if self.found_inf is not None and device.type != "cpu":
            # now, as the next step's work is queued
            self._values = self._values.to("cpu", non_blocking=True)
            self._copied = torch.Event(device.type)
            self._copied.record()

    @cached_property
    def _host_values(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values

    @cached_property
    def host_totals(self) -> list[float]:
        """[weight * loss, weight, ...], as of `MeasuredStep`."""
        read = self._host_values[self._checks :]
        if self._of_ranks:
            return read
        return [weighted_sum(self._weights, read), *self.counts]

    @property
    def vanishes(self) -> bool:
        """Whether every gradient is zero; False where that is not known."""
        return self.found_inf is None and not any(self._host_values[: self._checks])

    @cached_property
    def finite(self) -> bool:
        """Whether every gradient is finite."""
        if self.found_inf is not None:
            return not self._host_values[0]
        # a norm may overflow by itself
        norms = self._host_values[: self._checks]
        return all(map(math.isfinite, norms)) or self._source.guard.is_finite()


def _nan_as_inf(loss: Tensor, like: Tensor) -> Tensor:
    """Infinite where the loss is nan, as without a label that counts; else a finite number."""
    return loss.to(like.dtype).nan_to_num(math.inf, 0.0, 0.0)
