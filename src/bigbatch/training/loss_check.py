"""What is no mean loss of a micro-batch: one that a GradScaler scaled, a share of it, a sum."""

import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from bigbatch.errors import LoopError

_LOOKED_AT = 8  # losses of a training: its code does not change
_DEPTH = 3  # nodes of the graph, from the loss
_MEAN, _SUM = 1, 2  # `reduction` of torch's loss functions, as their nodes have it
_PASSED = ("ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "AliasBackward0")
_MOST = 1024  # micro-batches, by which a loss may have been divided
_RATIO = math.log(1.4)  # of two sizes that are compared
_HITS = 4  # changes of size that the loss has followed, with none that it has not
_MEANS = (
    'pass the mean loss of the micro-batch (reduction="mean"): step.backward weighs it by its '
    "samples. If it is not a sum over samples, continue"
)


class LossCheck:
    """Looks at the first losses of a training, and at what the loss of a step does with sizes.

    Args:
        warns: whether this rank warns.
        has_scaler: whether a GradScaler was given, so that the loss is scaled in the step.
    """

    def __init__(self, *, warns: bool, has_scaler: bool) -> None:
        self._warns, self._has_scaler = warns, has_scaler
        self._left, self._searched = _LOOKED_AT, False
        self._before: tuple[float, float] | None = None  # (size, loss) of the step before
        self._hits: int | None = 0  # None: the loss is no sum

    def examine(self, loss: Tensor, samples: int, micro_batches: float) -> None:
        """Looks at the graph of a micro-batch's loss, for some microseconds.

        Args:
            loss: as it was given.
            samples: of the micro-batch.
            micro_batches: of the step on this rank, as is expected.
        Raises:
            LoopError: a GradScaler has scaled it.
        """
        if not self._left:
            return
        self._left -= 1
        nodes = list(_chain(loss))
        self._refuse_scaled(nodes)
        message = _summed(nodes, samples) or _divided(nodes, round(micro_batches))
        if message:
            self._left = 0
            self._warn(message)

    def compare(self, size: float, loss: float) -> None:
        """Compares the mean loss of a step with that of the step before.

        Args:
            size: samples of a micro-batch, on average.
            loss: mean over the step.
        """
        before, self._before = self._before, (size, loss)
        if self._hits is None or before is None:
            return
        if not (0 < loss < math.inf and 0 < before[1] < math.inf):
            return
        ratio = math.log(size / before[0])
        if abs(ratio) < _RATIO:
            return
        follows = 0.5 < math.log(loss / before[1]) / ratio < 1.5
        self._hits = self._hits + 1 if follows else None
        if self._hits == _HITS:
            self._hits = None
            self._warn(
                f"the loss grows with the samples of a micro-batch ({_HITS} times on end, now "
                f"{before[1]:.4g} -> {loss:.4g} for {before[0]:g} -> {size:g} samples), as a sum "
                f"over samples does; {_MEANS}"
            )

    def _refuse_scaled(self, nodes: list[Any]) -> None:
        factors = [f for node in nodes if (f := _factor(node, "MulBackward0")) is not None]
        factors = [f for f in factors if f.dtype == torch.float32 and not f.requires_grad]
        if not factors or self._searched:
            return
        self._searched = True  # among all objects: some milliseconds
        if not any(map(_is_scale, factors)):
            return
        raise LoopError(
            "the loss was scaled by a GradScaler, and step.backward scales it by the scaler= that "
            "AdaptiveBatch has; pass it as it is: step.backward(loss)"
            if self._has_scaler
            else "the loss was scaled by a GradScaler that AdaptiveBatch was not given, so nothing "
            "would take its scale out; pass AdaptiveBatch(scaler=scaler) and the loss as it is: "
            "step.backward(loss), step.update() and no scaler.step() or scaler.update()"
        )

    def _warn(self, message: str) -> None:
        if self._warns:
            warnings.warn(message, stacklevel=6)


def _chain(loss: Tensor) -> Iterator[Any]:
    """The node of the loss and those of its first arguments, but for casts and views."""
    node = loss.grad_fn
    for _ in range(_DEPTH):
        if node is None:
            return
        if node.name() not in _PASSED:
            yield node
        node = node.next_functions[0][0] if node.next_functions else None


def _factor(node: Any, name: str) -> Tensor | None:
    """The one number that a product or a quotient was made with; without reading it."""
    if node.name() != name:
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # freed by a backward of the user's own
        return None
    return other if isinstance(other, Tensor) and other.numel() == 1 else None


def _is_scale(factor: Tensor) -> bool:
    """Whether it is the scale of a GradScaler, itself."""
    return any(
        issubclass(type(holder), GradScaler)
        or (type(holder) is dict and holder.get("_scale") is factor and "_growth_factor" in holder)
        for holder in gc.get_referrers(factor)
    )


def _reduction(node: Any) -> int | None:
    reduction: int | None = getattr(node, "_saved_reduction", None)
    return reduction


def _summed(nodes: list[Any], samples: int) -> str:
    """Of a loss function with reduction='sum'."""
    if not nodes or samples < 2 or _reduction(nodes[0]) != _SUM:
        return ""
    return (
        f'the loss of a micro-batch of {samples} samples is a sum (reduction="sum", '
        f"{nodes[0].name()}); {_MEANS}"
    )


def _divided(nodes: list[Any], micro_batches: int) -> str:
    """Of a mean loss that was divided by a whole number, as accumulation needs elsewhere.

    Half a squared error is no such thing; what somebody averages by himself only where the number
    is that of the micro-batches.
    """
    if len(nodes) < 2 or (divisor := _factor(nodes[0], "DivBackward0")) is None:
        return ""
    number = float(divisor) if divisor.is_cpu else math.nan
    if not (number.is_integer() and 2 <= number <= _MOST):
        return ""
    name, known = nodes[1].name(), _reduction(nodes[1]) == _MEAN
    mean = known or (name == "MeanBackward0" and number == micro_batches)
    if not mean or (number == 2 and not name.startswith("NllLoss")):
        return ""
    return (
        f"the mean loss of a micro-batch was divided by {number:g}; step.backward weighs "
        "micro-batches by itself, so the gradient would be as many times too short: pass the loss "
        "as it is, or, if this is not left over from accumulation, continue"
    )
