"""Sees where a backward begins, without Python for each parameter."""

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from bigbatch.gradients.gradient_hooks import remove_hooks, weak_method

HOOKS = operator.attrgetter("_backward_hooks")
current_backward = torch._C._current_graph_task_id  # its number; -1 outside a backward


class FirstHook:
    """Calls functions at the first gradient of a backward, and after its last.

    Each parameter has the same hook: `next` of an iterator, which is C and gives None as long as
    the backward is the same; each backward enters Python once. A hook on a tensor runs before its
    gradient is accumulated, so the first one of a backward runs before any is.

    Args:
        begins: called at the first hook; whether `ends` is to be called. What it raises is raised
            after the backward.
        ends: called when the backward is complete.
        gone: called when autograd has dropped the backward, complete or failed.
        over: called after that, with True if code of the user may have run since a failure. On a
            device a thread of autograd's drops a failed backward some time later: `gone` is called
            there, and `over` by `require_over` or at the next backward.
    """

    def __init__(
        self,
        begins: Callable[[], bool],
        ends: Callable[[], None],
        gone: Callable[[], None],
        over: Callable[[bool], None],
    ) -> None:
        self._handles: dict[int, RemovableHandle] = {}  # by id of the parameter
        self._backwards = _Backwards(*map(weak_method, (begins, ends, gone, over)))
        hook: Any = functools.partial(next, itertools.chain.from_iterable(self._backwards))
        hook.__torch_unserializable__ = True  # torch.save(model) stays silent
        hook.only_watches = True
        self._hook = hook
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Puts the hook on these parameters, and on no other."""
        trained = {id(p): p for p in parameters if p.requires_grad}
        for key in [key for key in self._handles if key not in trained]:
            self._handles.pop(key).remove()
        for key, parameter in trained.items():
            if key not in self._handles:
                self._handles[key] = parameter.register_hook(self._hook)  # type: ignore[no-untyped-call]

    def require_over(self) -> None:
        """Calls `over` if the last backward has failed and that was not called yet."""
        if current_backward() < 0:
            self._backwards.leave(late=True)

    def close(self) -> None:
        """Removes every hook."""
        remove_hooks(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def handles(self) -> Iterable[RemovableHandle]:
        """The handles of the hooks."""
        return self._handles.values()


def is_nested() -> bool:
    """Whether this hook runs in a backward that the backward of another function has called."""
    return _is_in_function(sys._getframe())


def follows(number: int) -> bool:
    """Whether the present backward comes after that of this number, rather than inside it."""
    is_other = current_backward() != number
    return is_other and not any(map(_is_in_function, sys._current_frames().values()))


def _is_in_function(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


class _Backwards:
    """Iterates over portions of None; every backward begins with a new portion."""

    def __init__(
        self,
        begins: Callable[[], bool],
        ends: Callable[[], None],
        gone: Callable[[], None],
        over: Callable[[bool], None],
    ) -> None:
        self._begins, self._ends, self._gone, self._over = begins, ends, gone, over
        self._number = -1  # torch's number of the present backward
        self._error: BaseException | None = None  # of it
        self._in_backward: weakref.ref[Any] | None = None  # to an object that lives as long as it

    def __iter__(self) -> Iterator[Iterable[None]]:
        return self

    def __next__(self) -> Iterable[None]:
        """A portion for this backward; an iterator that has raised would be over for `chain`."""
        if self._in_backward is not None and follows(self._number):
            self.leave(late=True)  # the one before has failed
        if self._in_backward is None:
            self._number = current_backward()
            self._start()
        is_same = functools.partial(operator.eq, current_backward())
        numbers = itertools.takewhile(is_same, iter(current_backward, None))
        return map(dict[int, None]().get, numbers)

    def _start(self) -> None:
        watches = False
        try:
            watches = self._begins()
        except BaseException as error:  # raised in `_end`
            self._error = error
        last = functools.partial(self._end, watches)  # the engine drops it if the backward fails
        self._in_backward = weakref.ref(last, self._dropped)
        Variable._execution_engine.queue_callback(last)

    def _end(self, watches: bool) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if watches:
                self._ends()
        finally:
            self._gone()
            self.leave()

    def _dropped(self, backward: object) -> None:
        if backward is self._in_backward:
            self._gone()
            if sys._getframe().f_back is not None:  # of the user's code, which waits for this
                self.leave()

    def leave(self, *, late: bool = False) -> None:
        """The present backward, if there is one, has ended or failed."""
        if self._in_backward is not None:
            self._in_backward = self._error = None
            self._over(late)
