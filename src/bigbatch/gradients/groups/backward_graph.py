"""The graph that a backward will run: its nodes, their shapes and saved tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from bigbatch.errors import GradientError

Node = Any
"""A `torch.autograd.graph.Node`, whose C++ attributes have no types."""

_Edge = tuple[Node, int]


def nodes_of(roots: Iterable[Tensor]) -> list[Node]:
    """Every node below the roots, in an order that depends on the structure of the graph alone."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    nodes: list[Node] = []
    visited: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes.append(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return nodes


def signature(nodes: Iterable[Node]) -> tuple[object, ...]:
    """What graphs of one structure share: names of functions, and the leaves themselves."""
    return tuple(id(leaf) if (leaf := leaf_of(node)) is not None else node.name() for node in nodes)


def leaf_of(node: Node) -> Tensor | None:
    """The tensor that a node accumulates into; None for any other node."""
    return getattr(node, "variable", None)


def shape_of(node: Node, number: int = 0) -> torch.Size:
    """The shape of an output of the forward function, and so of its gradient."""
    return torch.Size(node._input_metadata[number].shape)


def saved_tensor(node: Node, name: str) -> Tensor:
    """A tensor that the forward saved, without taking it from the node.

    Non-reentrant checkpointing gives each of them once in a backward; the node's own turn is kept.

    Raises:
        GradientError: this release of torch checkpoints in another way.
    """
    packed = getattr(node, f"_raw_saved_{name}").data
    if isinstance(packed, checkpoint._Holder):
        handles = getattr(packed, "handles", None)
        if not isinstance(handles, dict):
            raise GradientError(
                f"torch {torch.__version__} checkpoints in a way that is not known here; measure "
                "by micro-batches (groups=None), or without checkpointing"
            )
        packed.handles = _OneMoreRead(handles)
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach() if tensor.requires_grad else tensor


class _OneMoreRead(dict[int, Any]):
    """The handles of a checkpointed tensor, of which the first read takes none away."""

    def __init__(self, handles: dict[int, Any]) -> None:
        super().__init__(handles)
        self._read: set[int] = set()

    def __setitem__(self, key: int, value: Any) -> None:
        if value is None and key not in self._read:
            self._read.add(key)
        else:
            super().__setitem__(key, value)
