"""Hooks on parameters, which keep neither a source nor a parameter alive."""

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import RemovableHandle

_NESTED = 2  # backwards on the stacks where one runs inside another
current_backward = torch._C._current_graph_task_id  # torch's number of it; -1 outside


def weak_method(method: Any) -> Callable[..., Any]:
    """Calls a bound method while its object lives: hooks live as long as models."""
    return weakly(method.__func__, method.__self__)


def weakly(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """Calls a function with its first argument, while that lives."""
    reference = weakref.ref(owner)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else function(alive, *arguments)

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


def watching_hook(function: Callable[..., None]) -> Any:
    """A hook that changes no gradient, also in a compiled training step."""
    return _marked(_disable_dynamo(function))


def _marked(hook: Any) -> Any:
    hook.__torch_unserializable__ = True  # torch.save(model) stays silent
    hook.only_watches = True
    return hook


def first_hook(begins: Callable[[], bool]) -> Any:
    """A hook for many tensors, of which a backward enters Python once, at its first gradient.

    It is `next` of an iterator, which gives None, in C. A hook on a tensor runs before its gradient
    is accumulated, so the first one of a backward runs before any is. `begins` is called in it, and
    returns whether the others are left out; an iterator that has raised is over, so it must not.
    """
    begins = weak_method(begins)

    def nones_of_backward() -> Any:
        if not begins():
            return [None]
        is_same = functools.partial(operator.eq, current_backward())
        numbers = itertools.takewhile(is_same, iter(current_backward, None))
        return map(dict[int, None]().get, numbers)

    nones = itertools.chain.from_iterable(iter(nones_of_backward, None))
    return _marked(functools.partial(next, nones))


def raise_after_backward(error: BaseException) -> None:
    """Lets the backward in which a hook runs end by an error, after its last gradient."""

    def fail() -> None:
        raise error

    Variable._execution_engine.queue_callback(fail)


def is_nested() -> bool:
    """Whether this hook runs in a backward that the backward of another function has called."""
    return _calls_of(BackwardCFunction.apply, sys._getframe()) > 0


def follows(backward: int) -> bool:
    """Whether the present backward comes after that of this number, and not inside it."""
    is_other = current_backward() != backward
    threads = sys._current_frames().values()
    return is_other and sum(_calls_of(_engine_run_backward, top) for top in threads) < _NESTED


def _calls_of(function: Any, frame: FrameType | None) -> int:
    """How many calls of a function are under way, down from a frame."""
    code, count = function.__code__, 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


def changed_later(parameter: Tensor) -> bool:
    """Whether a hook that is not ours comes after one of ours, and may change the gradient."""
    ours = [hasattr(hook, "only_watches") for hook in (parameter._backward_hooks or {}).values()]
    return True in ours and not all(ours[ours.index(True) :])


def remove_hooks(handles: MutableMapping[Any, RemovableHandle]) -> None:
    """Removes all hooks and their handles."""
    for handle in handles.values():
        handle.remove()
    handles.clear()
