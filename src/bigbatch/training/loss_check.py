"""Finds losses that are no mean over their samples: scaled, divided, summed, or over elements."""

import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from bigbatch.errors import LoopError, SettingError
from bigbatch.gradients.groups.backward_graph import saved_tensor
from bigbatch.training.loss_weights import (
    MEAN,
    SUM,
    label_counts,
    label_terms,
    mean_over_labels,
    without_casts,
)

_EXAMINED = 8  # losses of a training: its code does not change
_SUMS = ("SumBackward0", "SumBackward1")
_DEPTH = 3  # nodes of the graph, from the loss
_MAX_DIVISOR = 1024  # micro-batches by which a loss may have been divided
_MIN_LOG_RATIO = math.log(1.4)  # of two sizes that are compared
_CHANGES = 4  # changes of size that the loss has followed, and no other change
_REMEDY = (
    'pass the mean loss of the micro-batch (reduction="mean"): step.backward weighs it by its '
    "samples. If it is not a sum over samples, continue"
)


class LossCheck:
    """Examines the first losses of a training, and how the loss of a step changes with its size."""

    def __init__(self, *, warns: bool, has_scaler: bool) -> None:
        self._warns, self._has_scaler = warns, has_scaler
        self.remaining, self._searched = _EXAMINED, False  # losses still to examine
        self._previous: tuple[float, float] | None = None  # (size, loss) of the step before
        self._changes: int | None = 0  # None: the loss is no sum
        self._divisors: dict[int, float] = {}  # by the samples of the micro-batch

    def examine(
        self, loss: Tensor, samples: int, micro_batches: float, *, weighted: bool = False
    ) -> None:
        """Examines the graph of a micro-batch's loss; takes some microseconds.

        Args:
            loss: the loss.
            samples: samples of the micro-batch.
            micro_batches: how many the step has on this rank.
            weighted: whether its weight is given.
        Raises:
            LoopError: a GradScaler has scaled it.
        """
        self.remaining -= 1
        nodes = list(_first_nodes(loss))
        self._refuse_scaled(nodes)
        message = _sum_message(nodes, samples) or _division_message(nodes, round(micro_batches))
        if not message and nodes and not weighted and mean_over_labels(loss) is None:
            message = _terms_message(loss) or self._divisor_message(nodes, samples)
        if message:
            self.remaining = 0
            self._warn(message)

    def compare(self, size: float, loss: float) -> None:
        """Compares the mean micro-batch size and loss of a step with those of the step before."""
        previous, self._previous = self._previous, (size, loss)
        if self._changes is None or previous is None:
            return
        if not (0 < loss < math.inf and 0 < previous[1] < math.inf):
            return
        log_ratio = math.log(size / previous[0])
        if abs(log_ratio) < _MIN_LOG_RATIO:
            return
        follows = 0.5 < math.log(loss / previous[1]) / log_ratio < 1.5
        self._changes = self._changes + 1 if follows else None
        if self._changes == _CHANGES:
            self._changes = None
            self._warn(
                f"the loss grows with the samples of a micro-batch ({_CHANGES} times in a row, now "
                f"{previous[1]:.4g} -> {loss:.4g} for {previous[0]:g} -> {size:g} samples), as a "
                f"sum over samples does; {_REMEDY}",
                stacklevel=8,  # the line of step.update
            )

    def _divisor_message(self, nodes: list[Any], samples: int) -> str:
        """A message if equally many samples are a mean over different numbers; else empty."""
        divisor = _divisor(nodes)
        if divisor is None or divisor == (earlier := self._divisors.setdefault(samples, divisor)):
            return ""
        return (
            f"the losses of two micro-batches of {samples} samples are sums divided by {earlier:g} "
            f"and by {divisor:g}, and step.backward weighs them by samples; to train on the mean "
            "over all elements of a step, pass what the sum is divided by: step.backward(loss, "
            "weight=mask.sum()), for example. If that does not count elements, continue"
        )

    def _refuse_scaled(self, nodes: list[Any]) -> None:
        factors = [f for node in nodes if (f := _factor(node, "MulBackward0")) is not None]
        factors = [f for f in factors if f.dtype == torch.float32 and not f.requires_grad]
        if not factors or self._searched:
            return
        self._searched = True  # among all objects: takes some milliseconds
        if any(map(_is_scale, factors)):
            raise LoopError(
                "the loss was scaled by a GradScaler, and step.backward scales it by the scaler= "
                "that AdaptiveBatch has; pass the unscaled loss: step.backward(loss)"
                if self._has_scaler
                else "the loss was scaled by a GradScaler that AdaptiveBatch was not given, so "
                "nothing would take its scale out; pass AdaptiveBatch(scaler=scaler) and the "
                "unscaled loss: step.backward(loss), step.update() and no scaler.step() or "
                "scaler.update()"
            )

    def _warn(self, message: str, stacklevel: int = 6) -> None:  # the line of step.backward
        if self._warns:
            warnings.warn(message, stacklevel=stacklevel)


def _first_nodes(loss: Tensor) -> Iterator[Any]:
    """The node of the loss and those of its first arguments, without casts and views."""
    node = without_casts((loss.grad_fn, loss.output_nr))
    for _ in range(_DEPTH):
        if node is None:
            return
        yield node
        node = without_casts(node.next_functions[0]) if node.next_functions else None


def _factor(node: Any, name: str) -> Tensor | None:
    """The single number of a product or a quotient; it is not read."""
    if node.name() != name:
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # freed by a backward of the user's own
        return None
    return other if isinstance(other, Tensor) and other.numel() == 1 else None


def _is_scale(factor: Tensor) -> bool:
    """Whether a tensor is the scale of a GradScaler, the object itself."""
    return any(
        issubclass(type(owner), GradScaler)
        or (type(owner) is dict and owner.get("_scale") is factor and "_growth_factor" in owner)
        for owner in gc.get_referrers(factor)
    )


def _sum_message(nodes: list[Any], samples: int) -> str:
    """A message about a loss function with reduction='sum'; else empty."""
    if not nodes or samples < 2 or getattr(nodes[0], "_saved_reduction", None) != SUM:
        return ""
    return (
        f'the loss of a micro-batch of {samples} samples is a sum (reduction="sum", '
        f"{nodes[0].name()}); {_REMEDY}"
    )


def _terms_message(loss: Tensor) -> str:
    """A message about a cross entropy, among other terms, that leaves labels out; else empty."""
    for node in label_terms(loss):
        counts = label_counts(node)
        counted = float(counts.sum())
        if counted != counts.numel():
            return (
                f"the loss adds other terms to a mean over labels whose weights sum to {counted:g} "
                f"({counts.numel()} labels), and step.backward weighs it by samples; pass weight= "
                "with that sum, (y != -100).sum() for example, to weigh it by labels"
            )
    return ""


def _divisor(nodes: list[Any]) -> float | None:
    """What a loss divides a sum by; None if it cannot be seen."""
    first = nodes[0]
    if first.name() == "MeanBackward0":
        return float(first._saved_self_sym_numel)
    if getattr(first, "_saved_reduction", None) == MEAN and hasattr(first, "_saved_self"):
        return float(saved_tensor(first, "self").numel())
    is_sum = len(nodes) > 1 and (
        nodes[1].name() in _SUMS or getattr(nodes[1], "_saved_reduction", None) == SUM
    )
    divisor = _factor(first, "DivBackward0") if is_sum else None
    return None if divisor is None or divisor.requires_grad else float(divisor)


def _division_message(nodes: list[Any], micro_batches: int) -> str:
    """A message about a mean loss divided by a whole number, as in plain accumulation; else empty.

    Half a squared error is not such a loss. A mean that is not torch's own loss function counts
    only if the divisor is the number of micro-batches.
    """
    if len(nodes) < 2 or (divisor := _factor(nodes[0], "DivBackward0")) is None:
        return ""
    number = float(divisor) if divisor.is_cpu else math.nan
    if not (number.is_integer() and 2 <= number <= _MAX_DIVISOR):
        return ""
    name, is_mean = nodes[1].name(), getattr(nodes[1], "_saved_reduction", None) == MEAN
    is_mean |= name == "MeanBackward0" and number == micro_batches
    if not is_mean or (number == 2 and not name.startswith("NllLoss")):
        return ""
    return (
        f"the mean loss of a micro-batch was divided by {number:g}; step.backward weighs "
        "micro-batches by itself, so the gradient would be as many times too short: pass the "
        "undivided loss, or, if the division does not come from accumulation, continue"
    )


def one_number(loss: object, function: str) -> Tensor:
    """The mean loss that a function of the user's returned, checked."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise SettingError(
            f"{function} returned {what}; return the mean loss of the batch, a tensor of one number"
        )
    return loss
