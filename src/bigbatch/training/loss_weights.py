"""How much a micro-batch counts in the mean loss of a step: what its own mean is over."""

from typing import Any

from torch import Tensor

from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.backward_graph import Node, node_names, saved_tensor, shape_of

MEAN, SUM = 1, 2  # `reduction` of torch's loss functions, in their nodes

_MEANS = ("NllLossBackward0", "NllLoss2DBackward0")
_CASTS = node_names("Alias Clone ReshapeAlias Squeeze ToCopy UnsafeView Unsqueeze View")
_OF_ONE = node_names("Mean Select Stack Sum")  # which are no more where there is one number
_SINK = "_DDPSinkBackward"  # DDP's, of all outputs that its model returns
_TERMS = node_names("Add Sub")
_SUMS = _TERMS | node_names("Mean Stack Sum")
_FACTORS = node_names("Mul Div Neg") | {"MulBackward1", "DivBackward1"}
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
    node = _without_factors((loss.grad_fn, loss.output_nr))
    if node is not None and node.name() == "AddBackward0":  # label smoothing?
        if any(term.name() != _BY_TORCH for term, _ in node.next_functions):
            return None
        node = _without_factors(node.next_functions[0])
    is_mean = node is not None and node.name() in _MEANS and node._saved_reduction == MEAN
    return node if is_mean else None


def label_terms(loss: Tensor) -> list[Node]:
    """The means over labels among the terms of a sum."""
    # by node, since a node may be a term along many paths
    terms, seen = [(loss.grad_fn, loss.output_nr)], {}
    while terms:
        node = without_casts(terms.pop())
        if node is not None and node not in seen:
            seen[node] = node.name() in _MEANS and node._saved_reduction == MEAN
            if node.name() in _SUMS | _FACTORS:
                terms += node.next_functions
    return [node for node, is_mean in seen.items() if is_mean]


def without_casts(edge: tuple[Any, int]) -> Node | None:
    """The first node from an edge on that computes something."""
    node, output = edge
    while node is not None:
        name = node.name()
        is_one = len(operands := node.next_functions) == 1 and operands[0][0] is not None
        if name == _SINK:
            node, output = operands[output]
        elif name in _CASTS or (name in _OF_ONE and is_one and shape_of(*operands[0]).numel() == 1):
            node, output = operands[0]
        else:
            break
    return node


def _without_factors(edge: tuple[Any, int]) -> Node | None:
    """The first node that is neither a cast, nor a product with a constant or a sum with one."""
    while (node := without_casts(edge)) is not None and node.name() in _FACTORS | _TERMS:
        operands = [following for following in node.next_functions if following[0] is not None]
        if len(operands) != 1:
            break
        edge = operands[0]
    return node
