"""Prepares the groups of a backward after each forward of a model."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from bigbatch.gradients.source import GradientSource


class PrepareAfterForward:
    """A forward hook with keyword arguments; the samples are in the first tensor's dimension 0.

    Its copies, in copied and in saved models, do nothing.

    Args:
        source: is told of each forward; None for nothing.
    """

    def __init__(self, source: GradientSource | None = None) -> None:
        self._source = None if source is None else weakref.ref(source)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PrepareAfterForward, ()

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        source = None if self._source is None else self._source()
        if source is None or not torch.is_grad_enabled():
            return
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim())
        first = next(inputs, None)
        roots = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None]
        if first is not None and roots:
            source.prepare_groups(roots, len(first))
