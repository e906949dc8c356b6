"""Hooks on parameters, which keep neither a source nor a parameter alive."""

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

_Hook = TypeVar("_Hook", bound=Callable[..., None])


def weak_method(method: Any) -> Callable[..., Any]:
    """Calls a bound method while its object lives: hooks live as long as models."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*arguments)

    return call


def hands_errors_over(method: Any) -> Any:
    """For a method that hooks call, whose exceptions would end the user's backward.

    If its object has an `on_error`, that gets the exception, and the object is `failed`: it ignores
    its hooks until it restarts.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> None:
        if self.on_error is None:
            method(self, *arguments)
        elif not self.failed:
            try:
                method(self, *arguments)
            except Exception as error:
                self.failed = True
                self.on_error(error)

    return call


def gradient_hook(
    report: Callable[[Tensor, Tensor], None], parameter: "weakref.ref[Tensor]"
) -> Callable[[Tensor], None]:
    """For `register_hook` of a leaf: reports the gradient that the parameter is about to get."""

    def hook(gradient: Tensor) -> None:
        alive = parameter()
        if alive is not None:
            report(alive, gradient)

    return watching_hook(hook)


def watching_hook(function: _Hook) -> _Hook:
    """A hook that changes no gradient, also in a compiled training step."""
    hook: Any = _disable_dynamo(function)
    hook.__torch_unserializable__ = True  # torch.save(model) stays silent
    hook.only_watches = True
    return hook  # type: ignore[no-any-return]


def changed_later(parameter: Tensor) -> bool:
    """Whether a hook that is not ours comes after one of ours, and may change the gradient."""
    ours = [hasattr(hook, "only_watches") for hook in (parameter._backward_hooks or {}).values()]
    return True in ours and not all(ours[ours.index(True) :])


def remove_hooks(handles: MutableMapping[Any, RemovableHandle]) -> None:
    """Removes all hooks and their handles."""
    for handle in handles.values():
        handle.remove()
    handles.clear()
