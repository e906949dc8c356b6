"""How much a micro-batch counts in the mean loss of a step: what its own mean is over."""

from typing import Any

from torch import Tensor

from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.backward_graph import Node, saved_tensor

MEAN, SUM = 1, 2  # `reduction` of torch's loss functions, in their nodes

_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_CASTS = ("ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "AliasBackward0")
_SUMS = ("AddBackward0", "SubBackward0", "StackBackward0", "SumBackward0", "MeanBackward0")
_FACTORS = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1", "NegBackward0")
_BY_TORCH = "MulBackward1"  # a factor inside cross_entropy, for label smoothing; no one else's


def label_weights(loss: Tensor, samples: int) -> Tensor | None:
    """The weight of each sample in a mean cross entropy, (B,); waits for the device.

        n_i = sum of w_y over the labels y of sample i,    w_y = 0 if y is ignored

    torch divides by the sum of n_i: with class weights, or where `ignore_index` leaves labels out,
    not by the number of samples. So a batch's mean is that of its micro-batches weighted by n_i.

    Args:
        loss: a mean `cross_entropy` or `nll_loss`, also of images and sequences, with label
            smoothing, or times a number.
        samples: B.
    Returns:
        The weights, or their sum, (1,), if the labels are no multiple of the samples; None if the
        loss is something else, a sum of several terms for example.
    """
    node = mean_over_labels(loss)
    if node is None:
        return None
    counts = label_counts(node)
    is_even = counts.numel() % max(1, samples) == 0
    return counts.reshape(samples if is_even else 1, -1).sum(1)


def label_counts(node: Node) -> Tensor:
    """w_y of each label in a mean over labels: its class's weight, or 1; 0 if it is ignored."""
    target = saved_tensor(node, "target")
    ignored = int(node._saved_ignore_index)
    counts: Tensor = target != (ignored - (1 << 64) if ignored >> 63 else ignored)
    if node._saved_weight is None:
        return counts
    classes = saved_tensor(node, "weight").to(widest_float(target.device))
    return classes[target.where(counts, 0)].where(counts, 0)


def weighted_loss(loss: Tensor, factor: float) -> Tensor:
    """A micro-batch's part of the mean loss; zeros that have its graph for a factor of 0."""
    return loss * factor if factor else loss.nan_to_num(0.0, 0.0, 0.0) * 0


def mean_over_labels(loss: Tensor) -> Node | None:
    """The node of the mean over labels that the loss is; None if it is something else."""
    node = _without_factors(loss.grad_fn)
    if node is not None and node.name() == "AddBackward0":  # label smoothing?
        terms = [following for following, _ in node.next_functions]
        if any(term is None or term.name() != _BY_TORCH for term in terms):
            return None
        node = _without_factors(terms[0])
    is_mean = node is not None and node.name() in _MEANS and node._saved_reduction == MEAN
    return node if is_mean else None


def label_terms(loss: Tensor) -> list[Node]:
    """The means over labels among the terms of a sum."""
    terms, found = [loss.grad_fn], []
    while terms:
        node = without_casts(terms.pop())
        if node is None:
            continue
        if node.name() in _MEANS and node._saved_reduction == MEAN:
            found.append(node)
        elif node.name() in (*_SUMS, *_FACTORS):
            terms += [following for following, _ in node.next_functions]
    return found


def without_casts(node: Any) -> Node | None:
    """The first node that computes something."""
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node


def _without_factors(node: Any) -> Node | None:
    """The first node that is neither a cast nor a product with a constant."""
    while (node := without_casts(node)) is not None and node.name() in _FACTORS:
        operands = [following for following, _ in node.next_functions if following is not None]
        if len(operands) != 1:
            return None
        node = operands[0]
    return node
