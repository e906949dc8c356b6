"""How much a micro-batch counts in the mean loss of a step: what its own mean is over."""

from collections import deque
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.backward_graph import Node, node_names, saved_tensor, shape_of

NONE, MEAN, SUM = 0, 1, 2  # `reduction` of torch's loss functions, in their nodes

_CASTS = node_names("Alias Clone ReshapeAlias Squeeze ToCopy UnsafeView Unsqueeze View")
_CASTS |= {"SqueezeBackward1", "SqueezeBackward2"}
# which are no more where there is one number
_OF_ONE = node_names("Cat Clamp ClampMax ClampMin Expand Mean NanToNum Select Stack Sum Where")
_OF_ONE |= {"ClampBackward1", "MeanBackward1", "SumBackward1"}
_SINK = "_DDPSinkBackward"  # DDP's, of all outputs that its model returns
_PASSED = _CASTS | _OF_ONE | {_SINK}
_TERMS = node_names("Add Neg Sub") | {"RsubBackward1"}
_OF_MODELS = node_names("Addmm Bmm Convolution Embedding Mm")
_FACTORS = "MulBackward0", "DivBackward0"
_WEAKER = {torch.float64: torch.float16, torch.int64: torch.int8}
_FEW, _MOST_NODES = 64, 128  # numbers that a term gives, and terms that are looked at


class Term(NamedTuple):
    """A node that a loss is made of, and what leads to it."""

    node: Node
    path: int = 0  # kinds of nodes
    is_added: bool = True  # sums and differences alone
    is_linear: bool = True  # sums, products and quotients alone
    factor: Tensor | None = None  # the nearest tensor of one number that multiplies it
    divisor: Tensor | float | None = None  # the nearest number that divides it


def label_weights(loss: Tensor, samples: int, *, packed: bool = False) -> Tensor | None:
    """The weight of each sample in a mean cross entropy, (B,); waits for the device.

        n_i = sum of w_y over the labels y of sample i,    w_y = 0 if y is ignored

    torch divides by the sum of n_i, so a batch's mean is that of its micro-batches weighted by it.
    Gives that sum, (1,), if the labels are no multiple of the samples, or these are packed; None
    unless the loss is a mean `cross_entropy` or `nll_loss`, also with label smoothing, or times a
    number.
    """
    node = mean_over_labels(loss, 0 if packed else samples)  # one row is no single sample
    if node is None:
        return None
    counts = label_counts(node)
    if packed:
        return counts.sum(dim=0, keepdim=True)
    if counts.numel() == samples:
        return counts if counts.dtype.is_floating_point else counts.long()
    is_even = counts.numel() % max(1, samples) == 0
    if is_even and _has_time_first(node, samples):
        return counts.reshape(-1, samples).sum(0)
    return counts.reshape(samples if is_even else 1, -1).sum(1)


def _has_time_first(node: Node, samples: int) -> bool:
    """Whether the outputs were (T, B, classes) before they became rows."""
    edge = node.next_functions[0]
    while len(shape := shape_of(*edge)) == 2 and edge[0].name() in _CASTS | {"LogSoftmaxBackward0"}:
        edge = edge[0].next_functions[0]
    return len(shape) == 3 and shape[0] != samples == shape[1]


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
    if factor == 1:
        return loss
    return loss * factor if factor else loss.nan_to_num(0.0, 0.0, 0.0) * 0


def mean_over_labels(loss: Tensor, samples: int = 0) -> Node | None:
    """The node of the mean over labels that the loss is; None if it is something else."""
    node = loss.grad_fn
    if node is None or not is_mean_over_labels(node):
        node = without_factors(loss)
        if node is not None and node.name() == "AddBackward0":
            node = _smoothed(node)
        if node is None or not is_mean_over_labels(node):
            return None
    return None if samples == 1 and is_of_one_sample(node, 1) else node


def is_mean_over_labels(node: Node) -> bool:
    """Whether a node is a mean of torch's over labels."""
    return bool(node.name().startswith("NllLoss") and node._saved_reduction == MEAN)


def is_of_one_sample(node: Node, samples: int) -> bool:
    """Whether a loss function is of one of the samples in the first dimension of a tensor."""
    while node is not None and node.name() not in _OF_MODELS and (edges := _operands(node)):
        if node.name() in ("SelectBackward0", "UnbindBackward0") and node._saved_dim == 0:
            return shape_of(*edges[0])[0] == samples
        node = without_casts(edges[0])
    return False


def terms_of(loss: Tensor) -> list[Term]:
    """What a loss is made of as long as it is few numbers, nearest first."""
    found: dict[Node, Term] = {}  # by node, since a node may be a term along many paths
    edges = deque([((loss.grad_fn, loss.output_nr), Term(None))])
    while edges and len(found) < _MOST_NODES:
        edge, term = edges.popleft()
        if (node := without_casts(edge)) is None or node in found:
            continue
        found[node] = term = term._replace(node=node)
        if (name := node.name()) not in _TERMS:
            constant, is_product = factor_of(node), name.startswith("Mul")
            is_linear = term.is_linear and (is_product or constant is not None)
            factor = constant if is_product and isinstance(constant, Tensor) else term.factor
            divisor = term.divisor if is_product else constant
            term = Term(node, term.path, False, is_linear, factor, divisor)
        for number, operand in enumerate(node.next_functions):
            if operand[0] is not None and shape_of(*operand).numel() <= _FEW:
                edges.append((operand, term._replace(path=hash((term.path, name, number)))))
    return [*found.values()]


def without_casts(edge: tuple[Node, int]) -> Node:
    """The first node from an edge on that computes something; None if there is none."""
    node, output = edge
    while node is not None and (name := node.name()) in _PASSED:
        operands = [node.next_functions[output]] if name == _SINK else _operands(node)
        if name in _OF_ONE and [shape_of(*e).numel() for e in [*operands[:2], (node, 0)]] != [1, 1]:
            break
        node, output = operands[0]
    return node


def factor_of(node: Node) -> Tensor | float | None:
    """The constant number that a product multiplies or a quotient divides by; it is not read.

    A float if it was a number in Python: other dtypes win over that of such a number.
    """
    is_first = _operands(node) == [*node.next_functions[:1]]
    if len(_operands(node)) == 1 and node.name() in _FACTORS[: 1 + is_first]:
        with suppress(RuntimeError):  # freed by a backward of the user's own
            factor = saved_tensor(node, "other" if is_first else "self")
            other = torch.zeros((), dtype=_WEAKER.get(factor.dtype, torch.bool), device="cpu")
            is_number = not factor.dim() and torch.result_type(factor, other) == other.dtype
            return float(factor) if is_number else factor if factor.numel() == 1 else None
    return None


def without_factors(loss: Tensor) -> Node:
    """The first node that is neither a cast, nor a product with a number or a sum with a constant.

    A tensor may count the labels of the micro-batch, so a product with it is another loss.
    """
    edge = loss.grad_fn, loss.output_nr
    while (node := without_casts(edge)) is not None and len(operands := _operands(node)) == 1:
        if not isinstance(factor_of(node), float) and node.name() not in _TERMS:
            break
        (edge,) = operands
    return node


def _operands(node: Node) -> list[tuple[Node, int]]:
    return [operand for operand in node.next_functions if operand[0] is not None]


def _smoothed(node: Node) -> Node | None:
    """The mean over labels in a sum that torch's label smoothing makes; else None."""
    (mean, _), (node, _) = node.next_functions
    names = [mean.name()]
    while node.name().startswith(("Div", "MaskedFill", "Mul", "Neg", "Sum")):
        names.append(node.name())
        node = _operands(node)[0][0]
    kinds = " ".join(name.replace("Backward", "") for name in names).removesuffix(" Mul0")
    if kinds != "Mul1 Mul1 Div0 Sum0 MaskedFill0 Neg0 Sum1":
        return None
    ((mean, _),) = _operands(mean)
    return mean if [*map(without_casts, mean.next_functions)] == [node] else None
