"""Finds losses that are no mean over their samples: scaled, divided, summed, or over elements."""

import gc
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from bigbatch.errors import LoopError, SettingError
from bigbatch.gradients.groups.backward_graph import Node, leaf_of, saved_tensor, shape_of
from bigbatch.loop_warning import warn_in_loop
from bigbatch.training.loss_weights import (
    MEAN,
    NONE,
    SUM,
    Term,
    factor_of,
    is_mean_over_labels,
    is_of_one_sample,
    label_counts,
    terms_of,
    without_factors,
)

_EXAMINED = 8  # losses of a training: its code does not change
_SUMS = ("NansumBackward0", "SumBackward0", "SumBackward1")
_MAX_DIVISOR = 1024  # micro-batches by which a loss may have been divided
_ADDED_UP = ("AbsBackward0", "PowBackward0")  # by hand, as losses that are not reduced
_OF_LABELS = (
    "the loss is no plain mean over its labels ({}): they weigh {{:g}} each in one micro-batch and "
    "{{:g}} in another, and step.backward weighs it by samples; pass weight= with the sum of these "
    "weights, (y != -100).sum() for example. If samples are meant, continue"
)
_OF_ELEMENTS = (
    "the losses of two micro-batches of {} samples are sums divided by {{:g}} and by {{:g}}, and "
    "step.backward weighs them by samples; for the mean over all elements of a step, pass what the "
    "sum is divided by: step.backward(loss, weight=mask.sum()). If it counts no elements, continue"
)
_REMEDY = (
    'pass the mean loss of the micro-batch (reduction="mean"): step.backward weighs it by its '
    "samples. If it is not a sum over samples, continue"
)


class LossCheck:
    """Examines the first losses of a training, and those that have means over labels."""

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self.examined = {"samples", "labels", "given"}  # weightings whose losses are examined
        self._searched, self._count, self._has_labels = False, 0, False
        self._divisors: dict[object, list[float]] = {}  # by the term and its samples
        self._of_step: list[tuple[object, list[Any], str]] = []  # not compared yet

    def examine(self, loss: Tensor, samples: int, micro_batches: float, weighting: str) -> None:
        """Examines a micro-batch's loss; raises a LoopError if a GradScaler has scaled it."""
        self._count += 1
        message, is_early = "", self._count <= _EXAMINED
        terms = terms_of(loss) if is_early or weighting == "samples" else []
        if is_early:
            nodes = [term.node for term in terms]
            self._refuse_scaled(nodes)
            message = _sum_message(terms, samples) or _division_message(nodes, round(micro_batches))
        self._has_labels |= weighting == "labels"
        if weighting == "samples" and terms:
            self._note(loss, terms, samples, is_early)
        if not is_early:  # a loss may be a mean over other labels later
            self.examined = {"samples"} if self._has_labels else set()
        if message:
            self._warn(message)

    def _note(self, loss: Tensor, terms: list[Term], samples: int, is_early: bool) -> None:
        """Notes what each term is a mean over; the labels are counted at the end of the step."""
        means = [term for term in terms if is_mean_over_labels(term.node)]
        self._has_labels |= bool(means)
        cause = without_factors(loss)
        kind = "times a tensor" if factor_of(cause) is not None else cause.name()
        labels: list[Any] = [(t, label_counts(t.node).float().mean()) for t in means]
        sizes: list[Any] = [(t, d) for t in terms if is_early and (d := _divisor(t)) is not None]
        for noted, message in (
            (labels, _OF_LABELS.format(kind)),
            (sizes, _OF_ELEMENTS.format(samples)),
        ):
            noted = [(t, d) for t, d in noted if not is_of_one_sample(t.node, samples)]
            if len(noted) == samples > 2:  # a mean of each sample
                continue
            for term, divisor in noted:
                key = term.path, message, term.factor is None or samples
                # the factor may make it a sum over samples, or a mean
                values = [divisor] if term.factor is None else [divisor, divisor / term.factor]
                self._of_step.append((key, values, message))

    def end_step(self) -> None:
        """Warns of a term that is a mean over different numbers in two micro-batches."""
        noted, self._of_step = self._of_step, []
        for key, values, message in noted:
            now = [*map(float, values)]
            earlier = self._divisors.setdefault(key, now)
            if all(abs(a - b) > 1e-4 * abs(a) for a, b in zip(now, earlier, strict=False)):
                self._warn(message.format(earlier[0], now[0]))
                return

    def _refuse_scaled(self, nodes: list[Any]) -> None:
        factors = [f for node in nodes if isinstance(f := factor_of(node), Tensor)]
        if not factors or self._searched:
            return
        self._searched = True  # among all objects: takes some milliseconds
        if any(map(_is_scale, factors)):
            raise LoopError(
                "the loss was scaled by a GradScaler, which step.backward does itself; pass the "
                "unscaled loss, and AdaptiveBatch(scaler=scaler) if it was not given: then "
                "step.backward(loss), step.update() and no scaler.step() or scaler.update()"
            )

    def _warn(self, message: str) -> None:
        self.examined, self._of_step = set(), []  # one is enough
        if self._warns:
            warn_in_loop(message)


def _is_scale(factor: Tensor) -> bool:
    """Whether a tensor is the scale of a GradScaler, the object itself."""
    return any(
        issubclass(type(owner), GradScaler)
        or (type(owner) is dict and owner.get("_scale") is factor and "_growth_factor" in owner)
        for owner in gc.get_referrers(factor)
    )


def _sum_message(terms: list[Term], samples: int) -> str:
    """A message about a sum over samples among the terms; else empty."""
    for node in (term.node for term in terms if term.is_added and samples > 1):
        if _adds_up(node, samples):
            kind = node.name()
            return f"the loss of a micro-batch of {samples} samples is a sum ({kind}); {_REMEDY}"
    return ""


def _adds_up(node: Node, samples: int) -> bool:
    """Whether a node is the sum of a loss function, of squares or of absolute values of samples."""
    summed, is_sum = node, getattr(node, "_saved_reduction", None) == SUM
    if node.name() in _SUMS:
        summed, _ = edge = node.next_functions[0]
        if summed is None or shape_of(*edge)[:1] != (samples,):
            return False
        is_sum = summed.name() in _ADDED_UP or getattr(summed, "_saved_reduction", None) == NONE
    is_penalty = any(leaf_of(operand) is not None for operand, _ in summed.next_functions)
    return is_sum and not is_penalty


def _divisor(term: Term) -> Tensor | float | None:
    """What a term divides a sum by; None if it cannot be seen."""
    node, divisor, reduction = term.node, term.divisor, getattr(term.node, "_saved_reduction", None)
    if not term.is_linear or node.name() in _SUMS or reduction == SUM:
        return divisor if term.is_linear else None
    if node.name() == "MeanBackward0":
        number = shape_of(*node.next_functions[0]).numel()
    elif reduction == MEAN and hasattr(node, "_saved_self"):
        name = "target" if is_mean_over_labels(node) else "self"
        number = saved_tensor(node, name).numel()
    else:
        return None
    chosen = number * float(1 if divisor is None else divisor)  # by the mean of a mask, for example
    return chosen if abs(chosen - round(chosen)) < 1e-3 else number


def _division_message(nodes: list[Any], micro_batches: int) -> str:
    """A message about a mean loss divided by a whole number, as in plain accumulation; else empty.

    Half a squared error is none, and a mean by hand counts only with the number of micro-batches.
    """
    if len(nodes) < 2 or nodes[0].name() != "DivBackward0":
        return ""
    number = factor_of(nodes[0])
    if not (isinstance(number, float) and number.is_integer() and 2 <= number <= _MAX_DIVISOR):
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
