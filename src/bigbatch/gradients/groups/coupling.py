"""Whether a loss couples samples: its functions between the loss and some outputs, by name."""

import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import chain
from traceback import walk_stack

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from bigbatch.gradients.groups.backward_graph import Edge, Node, node_names, operands_of, shape_of

_PRODUCTS = node_names("Addmm Addmv Bmm Baddbmm Cdist EuclideanDist Mm Mv")
_ELEMENTWISE = node_names("Add Sub Mul Div Maximum Minimum Where")
_JOINING = node_names("Cat Stack")
_LINEAR = node_names("Add Sub Where") | _JOINING | {"_DDPSinkBackward"}
_NONLINEAR_ALONG = node_names(
    "Cumprod CumulativeLogsumexp LinalgVectorNorm LogSoftmax Logsumexp Norm Prod Softmax Sort Std "
    "Topk Var VarMean"
) | {"NormBackward1", "ProdBackward1"}
_BENT = node_names("Abs Relu")  # of one number, linear near it
_NONLINEAR = node_names(
    "Abs Exp Expm1 Log Log10 Log1P Log2 LogSigmoid Pow Reciprocal Relu Rsqrt Sigmoid Softplus Sqrt "
    "Tanh"
) | {"PowBackward1", "PowBackward2"}
_SELECTING = node_names("Select Unbind")
_SLICING = node_names("Slice Split")
_REDUCTIONS = node_names("Mean Sum") | {"MeanBackward1", "SumBackward1"}


def coupling_function(roots: Iterable[Node], ends: Collection[Node], samples: int) -> str:
    """The function between a loss and the outputs of samples that mixes samples; empty if none.

    It is a product of two tensors of samples whose rows meet, a difference or another function of
    all pairs of rows, a deviation or softmax along the samples, a product of two means, or another
    nonlinear function of means, whose slope is another at the mean of a group alone.
    """
    depends, reduced = set(ends), set[Node]()  # reduced: functions of sums over samples alone
    members = dict[Edge, int]()  # values of one sample alone, in loops over samples; its number
    for node in _operands_first(roots, ends) if samples > 1 else ():
        operands = [edge for edge in node.next_functions if edge[0] in depends]
        if node in depends or not operands:
            continue
        depends.add(node)
        numbers = {members.get(edge) for edge in operands}
        if selected := _selected(node, operands[0], samples):
            members |= selected
            continue
        if len(numbers) == 1 and None not in numbers:
            members |= dict.fromkeys(_outputs_of(node), *numbers)
            continue
        if _mixes(node, operands, samples):
            return str(node.name())
        is_joined = node.name() in _JOINING and numbers != {None}  # into a tensor of samples
        are_reduced = not is_joined and all(
            edge[0] in reduced or edge in members for edge in operands
        )
        is_product = len(operands) > 1 and node.name() not in _LINEAR
        is_divisor = node.name() == "DivBackward0" and operands[0] == node.next_functions[1]
        is_bent = node.name() in _BENT and shape_of(node).numel() == 1
        is_curved = is_divisor or (node.name() in _NONLINEAR and not is_bent)
        if are_reduced and (is_product or is_curved):
            return str(node.name())
        is_reduction = node.name() in _REDUCTIONS or getattr(node, "_saved_reduction", 0) > 0
        if are_reduced or (is_reduction and _is_along(node, operands[0], samples)):
            reduced.add(node)
    return ""


def leaves_samples(node: Node, operand: Edge, samples: int) -> bool:
    """Whether a function of samples in dimension 0 sums over them or selects one."""
    is_one = node.name() in _REDUCTIONS | _SELECTING and operand[0] is not None
    return is_one and shape_of(*operand)[:1] == (samples,) and _is_along(node, operand, samples)


def running_roots() -> list[Node]:
    """The nodes of the loss whose backward is running, from the frame of torch that runs it."""
    stacks = [walk_stack(sys._getframe())]
    if threading.current_thread() is not threading.main_thread():  # a backward on a GPU has its own
        stacks.append(walk_stack(sys._current_frames()[threading.main_thread().ident or 0]))
    for frame, _ in chain(*stacks):
        if frame.f_code is _engine_run_backward.__code__:
            roots = frame.f_locals["t_outputs"]
            nodes = (x.grad_fn if isinstance(x, Tensor) else x.node for x in roots)
            return [node for node in nodes if node is not None]
    return []


def _operands_first(roots: Iterable[Node], ends: Collection[Node]) -> Iterable[Node]:
    graph, waiting = dict[Node, list[Node]](), [*roots]
    for node in waiting:  # while they become more
        if node not in graph:
            graph[node] = [] if node in ends else operands_of(node)
            waiting += graph[node]
    return TopologicalSorter(graph).static_order()


def _outputs_of(node: Node) -> list[Edge]:
    return [(node, number) for number in range(len(node._input_metadata))]


def _selected(node: Node, operand: Edge, samples: int) -> dict[Edge, int]:
    """The sample of each output of a function that selects one, or takes all apart; else empty."""
    is_one = node.name() in _SELECTING or (node.name() in _SLICING and shape_of(node)[:1] == (1,))
    if not is_one or shape_of(*operand)[:1] != (samples,) or not _is_along(node, operand, samples):
        return {}
    index = getattr(node, "_saved_index", getattr(node, "_saved_start", None))
    return {
        edge: edge[1] if index is None else _signed(index) % samples for edge in _outputs_of(node)
    }


def _signed(number: int) -> int:
    return number - (1 << 64) * (number >> 63)


def _mixes(node: Node, operands: Sequence[Edge], samples: int) -> bool:
    """Whether a function, some of whose operands depend on samples, mixes them."""
    name, output = node.name(), shape_of(node)
    if name in _PRODUCTS:
        factors = [e for e in operands if len(shape_of(*e)) == len(output) or "v" in name]
        return len(factors) > 1 and not (len(output) > 2 and _has_rows(output[0], samples))
    if name in _NONLINEAR_ALONG:
        return _is_along(node, operands[0], samples)
    if name not in _ELEMENTWISE or len(operands) < 2:
        return False
    shapes = [(1,) * (len(output) - len(s)) + s for s in (shape_of(*e) for e in operands[:2])]
    if all(shape[:1] == (samples,) for shape in shapes):
        return False  # pairs in a sample
    repeated = [
        any(size == 1 < n and n % samples == 0 for size, n in zip(shape, output, strict=True))
        for shape in shapes
    ]
    return all(repeated)


def _has_rows(size: int, samples: int) -> bool:
    # all samples, or pairs of them
    return size > 1 and (size % samples == 0 or samples % size == 0)


def _is_along(node: Node, operand: Edge, samples: int) -> bool:
    """Whether a function reduces the samples, in dimension 0 of its operand, or all dimensions."""
    shape, dims = shape_of(*operand), getattr(node, "_saved_dim", None)
    is_elsewhere = samples in shape[1:] and 1 < shape[0] != samples
    if dims is None or dims == ():  # all
        return is_elsewhere or (len(shape) > 0 and _has_rows(shape[0], samples))
    if not shape or is_elsewhere or not _has_rows(shape[0], samples):
        return False
    signed = map(_signed, dims if isinstance(dims, tuple) else (dims,))
    return any(d % len(shape) == 0 for d in signed)
