"""The graph that a backward will run: its nodes, their shapes and saved tensors."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from bigbatch.errors import GradientError

Node = Any
"""A `torch.autograd.graph.Node`, whose C++ attributes have no types."""

Edge = tuple[Node, int]
"""A node, and the number of one of its forward function's outputs."""


def edges_of(tensors: Iterable[Tensor]) -> list[Edge]:
    """Where the backwards of these tensors start."""
    return [(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None]


def trace(roots: Iterable[Edge]) -> tuple[list[Node], tuple[object, ...]]:
    """Every node below the roots, in an order that depends on the structure of the graph alone.

    Returns:
        The nodes, and a key that graphs of one structure share: the names of their functions, and
        the leaves themselves.
    """
    waiting = [node for node, _ in roots]
    nodes: list[Node] = []
    key: list[object] = []
    visited: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes.append(node)
        edges = node.next_functions
        key.append(node.name() if edges else id(leaf_of(node)))
        waiting += [following for following, _ in edges if following is not None]
    return nodes, tuple(key)


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


def gradients_of_operands(node: Node, gradient: Tensor, output: int = 0) -> list[Tensor | None]:
    """What a function's node makes of the gradient of an output, before its turn in a backward."""
    for name in _names_of_saved(node.__class__):
        saved = getattr(node, f"_raw_saved_{name}")
        for one in saved if isinstance(saved, tuple) else (saved,):
            _keep(one)
    gradients: list[Tensor | None] = [None] * len(node._input_metadata)
    gradients[output] = gradient
    results = node(*gradients)
    results = results if isinstance(results, tuple) else (results,)
    return [
        # the engine sums over dimensions that were broadcast
        None if result is None or edge[0] is None else result.sum_to_size(shape_of(*edge))
        for result, edge in zip(results, node.next_functions, strict=False)
    ]


def constants_of(node: Node) -> list[Tensor]:
    """The tensors that a function saved and did not compute, and that have no gradient."""
    names = [name for name in _names_of_saved(node.__class__) if not name.startswith("result")]
    saved = [getattr(node, f"_saved_{name}") for name in names]
    tensors = [one for s in saved for one in (s if isinstance(s, (tuple, list)) else (s,))]
    return [one for one in tensors if isinstance(one, Tensor) and not one.requires_grad]


@cache
def _names_of_saved(kind: type) -> list[str]:
    prefix = "_raw_saved_"
    return [name.removeprefix(prefix) for name in dir(kind) if name.startswith(prefix)]


def _keep(saved: Any) -> None:
    """Non-reentrant checkpointing gives a tensor once; lets it be read until the node is freed.

    Raises:
        GradientError: this release of torch checkpoints in another way.
    """
    packed = saved.data
    if not isinstance(packed, checkpoint._Holder):
        return
    handles = getattr(packed, "handles", None)
    if not isinstance(handles, dict):
        raise GradientError(
            f"torch {torch.__version__} checkpoints in a way that is not known here; measure "
            "by micro-batches (groups=None), or without checkpointing"
        )
    if not isinstance(handles, _KeptHandles):
        packed.handles = _KeptHandles(handles)


class _KeptHandles(dict[int, Any]):
    """The handles of a checkpointed tensor, which a read does not take away."""

    def __setitem__(self, key: int, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)
