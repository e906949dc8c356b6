"""Hooks on parameters, which keep neither a source nor a parameter alive."""

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

_Hook = TypeVar("_Hook", bound=Callable[..., None])


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a bound method as long as its object lives: hooks live as long as models."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call


def gradient_hook(
    report: Callable[[Tensor, Tensor], None], parameter: "weakref.ref[Tensor]"
) -> Callable[[Tensor], None]:
    """For `register_hook` of a leaf: reports the gradient that it is about to get."""

    @_disable_dynamo  # in a compiled training step
    def hook(gradient: Tensor) -> None:
        leaf = parameter()
        if leaf is not None:
            report(leaf, gradient)

    return _marked(hook)


def accumulated_hook(report: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """For `register_post_accumulate_grad_hook`: reports that a gradient has come into `.grad`."""

    @_disable_dynamo
    def hook(parameter: Tensor) -> None:
        report(parameter)

    return _marked(hook)


def _marked(hook: _Hook) -> _Hook:
    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save(model) stays silent
    hook.only_watches = True  # type: ignore[attr-defined]
    return hook


def only_watched(parameter: Tensor) -> bool:
    """Whether all hooks on a leaf's gradient are ours, so that none changes it after them."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in hooks.values() if hooks else ():
            if not hasattr(hook, "only_watches"):
                return False
    return True


def changed_later(parameter: Tensor) -> bool:
    """Whether a hook that is not ours comes after one of ours, and may change the gradient."""
    ours = [hasattr(hook, "only_watches") for hook in (parameter._backward_hooks or {}).values()]
    return True in ours and not all(ours[ours.index(True) :])


def remove(handles: MutableMapping[Any, RemovableHandle]) -> None:
    """Takes hooks off."""
    for handle in handles.values():
        handle.remove()
    handles.clear()
