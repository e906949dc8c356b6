"""Prepares the groups of a backward after each forward of a model."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from bigbatch.gradients.source import GradientSource


def prepare_after_forward(source: GradientSource) -> Callable[..., None]:
    """A forward hook with keyword arguments; the samples are in the first tensor's dimension 0."""
    reference = weakref.ref(source)

    @_disable_dynamo
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        source = reference()
        if source is None or not torch.is_grad_enabled():
            return
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim())
        first = next(inputs, None)
        roots = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None]
        if first is not None and roots:
            source.prepare_groups(roots, len(first))

    return hook
