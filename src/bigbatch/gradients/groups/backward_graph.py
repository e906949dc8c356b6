"""The graph that a backward will run: its nodes, their shapes and saved tensors."""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

Node = Any
"""A `torch.autograd.graph.Node`, whose C++ attributes have no types."""

Edge = tuple[Node, int]
"""A node, and the number of one of its forward function's outputs."""

_EDGES = operator.attrgetter("next_functions")


def node_names(functions: str) -> frozenset[str]:
    """The names of the nodes of functions, which are separated by spaces."""
    return frozenset(f"{function}Backward0" for function in functions.split())


_WITH_MODES = node_names("BatchNorm CudnnBatchNorm MiopenBatchNorm NativeBatchNorm")
"""Functions of one name that compute something else in training."""


def edges_of(tensors: Iterable[Tensor]) -> list[Edge]:
    """Where the backwards of these tensors start."""
    return [(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None]


ParametersOf = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""The watched parameters that leaves of a graph are; None for other leaves."""


def trace(
    roots: Iterable[Edge], parameters_of: ParametersOf
) -> tuple[list[Node], tuple[object, ...]]:
    """Every node below the roots, in an order of the structure alone; and a key of that."""
    nodes: list[Node] = []
    numbers: dict[Node | None, int] = {None: -1}
    key: list[object] = []
    for edges in itertools.chain([roots], map(_EDGES, nodes)):  # while the nodes become more
        for following, output in edges:
            if following not in numbers:
                numbers[following] = len(nodes)
                nodes.append(following)
            key += numbers[following], output
        key += (None,)
    kinds = list(map(type, nodes))
    pairs = list(zip(nodes, kinds, strict=True))
    key += [node._saved_training for node, kind in pairs if kind.__name__ in _WITH_MODES]
    leaves = [node.variable for node, kind in pairs if kind.__name__ == "AccumulateGrad"]
    return nodes, (*key, *kinds, *map(id, parameters_of(leaves)))


def is_batch_norm(node: Node) -> bool:
    """Whether a function normalizes over the samples of a batch."""
    # InstanceNorm moves the samples to the channels, so that dimension 0 has size 1
    is_one = "BatchNorm" in node.name() and shape_of(node)[:1] != (1,)
    return is_one and bool(getattr(node, "_saved_training", True))


def operands_of(node: Node) -> list[Node]:
    """The nodes whose outputs a function takes."""
    return [following for following, _ in node.next_functions if following is not None]


def leaf_of(node: Node) -> Tensor | None:
    """The tensor that a node accumulates into; None for any other node."""
    return getattr(node, "variable", None)


def shape_of(node: Node, number: int = 0) -> torch.Size:
    """The shape of an output of the forward function, and so of its gradient."""
    return torch.Size(node._input_metadata[number].shape)


def saved_tensor(node: Node, name: str) -> Tensor:
    """A tensor that the forward saved, without taking it from the node."""
    _keep(getattr(node, f"_raw_saved_{name}"))
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach() if tensor.requires_grad else tensor


def gradients_of_operands(node: Node, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What a function's node makes of the gradients of its outputs, before its turn."""
    _keep_saved(node)
    pairs = zip(gradients, node._input_metadata, strict=True)
    # the engine casts too, to the dtype of the outputs, in which other operands are
    results = node(*(None if g is None else g.to(metadata.dtype) for g, metadata in pairs))
    results = results if isinstance(results, tuple) else (results,)
    return [
        # the engine sums over dimensions that were broadcast
        None if result is None or edge[0] is None else result.sum_to_size(shape_of(*edge))
        for result, edge in zip(results, node.next_functions, strict=False)
    ]


def constants_of(node: Node) -> list[Tensor]:
    """The tensors that a function saved and did not compute, and that have no gradient."""
    _keep_saved(node)
    names = [name for name in _names_of_saved(node.__class__) if not name.startswith("result")]
    saved = [getattr(node, f"_saved_{name}") for name in names]
    tensors = [one for s in saved for one in (s if isinstance(s, (tuple, list)) else (s,))]
    return [one for one in tensors if isinstance(one, Tensor) and not one.requires_grad]


def written_in_python(nodes: Iterable[Node]) -> list[Node]:
    """The functions that are subclasses of `torch.autograd.Function`."""
    return [node for node in nodes if isinstance(node, BackwardCFunction)]


def saved_by_python(node: Node) -> list[Tensor]:
    """The tensors that a function written in Python keeps for its backward."""
    _keep_saved(node)
    return [one for one in (*node.saved_tensors, *vars(node).values()) if isinstance(one, Tensor)]


def _keep_saved(node: Node) -> None:
    for name in _names_of_saved(node.__class__):
        saved = getattr(node, f"_raw_saved_{name}")
        for one in saved if isinstance(saved, tuple) else (saved,):
            _keep(one)


@cache
def _names_of_saved(kind: type) -> list[str]:
    prefix = "_raw_saved_"
    return [name.removeprefix(prefix) for name in dir(kind) if name.startswith(prefix)]


def _keep(saved: Any) -> None:
    """Non-reentrant checkpointing gives a tensor once; lets it be read until the node is freed."""
    packed = saved.data
    if isinstance(packed, checkpoint._Holder) and not isinstance(packed.handles, _KeptHandles):
        packed.handles = _KeptHandles(packed.handles)


class _KeptHandles(dict[int, Any]):
    """The handles of a checkpointed tensor, which a read does not take away."""

    def __setitem__(self, key: int, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)
