"""Sees where a backward begins, without Python for each parameter."""

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from bigbatch.gradients.gradient_hooks import remove_hooks, weak_method

HOOKS = operator.attrgetter("_backward_hooks")
_BLANKS = 1024  # hooks of a backward between two calls of `_Backwards`


class FirstHook:
    """Calls functions at the first gradient of a backward, and after its last.

    Each parameter has the same hook: `next` of an iterator, which is C and gives None. The iterator
    is refilled by Python once a backward. A hook on a tensor runs before its gradient is
    accumulated, so the first one of a backward runs before any is.

    Args:
        begins: called at the first hook; whether `ends` is to be called. What it raises is raised
            after the backward.
        ends: called when the backward is complete.
        gone: called afterwards, also if the backward failed.
    """

    def __init__(
        self, begins: Callable[[], bool], ends: Callable[[], None], gone: Callable[[], None]
    ) -> None:
        self._handles: dict[int, RemovableHandle] = {}  # by id of the parameter
        backwards = _Backwards(weak_method(begins), weak_method(ends), weak_method(gone))
        hook: Any = functools.partial(next, itertools.chain.from_iterable(backwards))
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
    frame = sys._getframe()
    while (below := frame.f_back) is not None:
        frame = below
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
    return False


class _Backwards:
    """Iterates over blank values, in portions; every backward begins with a new portion."""

    def __init__(
        self, begins: Callable[[], bool], ends: Callable[[], None], gone: Callable[[], None]
    ) -> None:
        self._begins, self._ends, self._gone = begins, ends, gone
        self._blanks: list[None] = []
        self._error: BaseException | None = None  # of the present backward
        self._in_backward: weakref.ref[Any] | None = None  # to an object that lives as long as it

    def __iter__(self) -> Iterator[Iterable[None]]:
        return self

    def __next__(self) -> Iterable[None]:
        """A portion of blanks; an iterator that has raised would be over for `chain`."""
        if self._in_backward is None:
            self._start()
        self._blanks = [None] * _BLANKS
        return iter(self._blanks)

    def _start(self) -> None:
        watches = False
        try:
            watches = self._begins()
        except BaseException as error:  # raised in `_end`
            self._error = error
        last = functools.partial(self._end, watches)  # the engine drops it if the backward fails
        self._in_backward = weakref.ref(last, self._leave)
        Variable._execution_engine.queue_callback(last)

    def _end(self, watches: bool) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if watches:
                self._ends()
        finally:
            self._leave(self._in_backward)

    def _leave(self, backward: object) -> None:
        if backward is self._in_backward and backward is not None:
            self._in_backward = self._error = None
            self._blanks.clear()
            self._gone()
