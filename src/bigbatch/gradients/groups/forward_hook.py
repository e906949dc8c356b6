"""Prepares the groups of a backward after each forward of a model."""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from bigbatch.gradients.source import GradientSource


class PrepareAfterForward:
    """A forward hook with keyword arguments; the samples are in a dimension of the first tensor."""

    def __init__(self, source: GradientSource | None = None, dim: int = 0) -> None:
        self._dim = dim
        self._source = None if source is None else weakref.ref(source)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PrepareAfterForward, ()  # in copied and in saved models it does nothing

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """The model's forward has ended."""
        source = None if self._source is None else self._source()
        tap = None if source is None else source.group_tap
        if source is None or tap is None or not torch.is_grad_enabled() or _is_transformed():
            return
        leaves = tree_leaves((args, kwargs))
        first = next((x for x in leaves if isinstance(x, Tensor) and x.dim()), None)
        roots = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None]
        if first is None:
            tap.missing = _message("no tensor of samples", "inputs", leaves)
        elif not roots:
            tap.missing = _message("no tensor with a gradient", "outputs", tree_leaves(output))
        else:
            source.prepare_groups(roots, first.shape[self._dim])


def _is_transformed() -> bool:
    """Whether a tracer or a transform of torch.func calls the model, whose graph is no step's."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return (
        torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (proxies is not None and proxies.get_proxy_mode() is not None)
    )


def _message(lacks: str, where: str, leaves: list[Any]) -> str:
    kinds = ", ".join(type(x).__name__ for x in leaves) or "nothing"
    return (
        f"the groups of the backward could not be prepared: the {where} of the model's forward "
        f"({kinds}) have {lacks}; pass and return tensors, or tuples, lists or dictionaries of "
        "them, or measure by micro-batches, groups=None"
    )
