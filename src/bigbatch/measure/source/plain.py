"""Gradients of plain tensors in one process: a hook on each leaf parameter."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.measure.source.door import Subscriber

_Stamp = tuple[int, int] | None  # which tensor .grad is, and how often it was written


class PlainSource:
    """Watches leaf parameters with `Tensor.register_hook`; copies no gradient.

    By itself every `backward()` is one micro-batch. `explicit=True` counts only what happens
    inside `with source.micro_batch(weight)`, so that other backwards are not counted.

    It also holds what makes the numbers trustworthy: `.grad` is clean before the first
    micro-batch and is changed by nobody else until the last.
    """

    def __init__(self, parameters: Iterable[Tensor], *, explicit: bool = False) -> None:
        self.explicit = explicit
        self.parameters: list[Tensor] = []
        self.micro_batches = 0
        self.backwards_not_counted = 0
        self._subscribers: list[Subscriber] = []
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._inside = False
        self._stamps: list[_Stamp] = []
        self._before: list[_Stamp] = []
        weakref.finalize(self, _remove, self._handles)
        self.add(parameters)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters; those already watched are left as they are."""
        known = set(self.parameters)
        for parameter in parameters:
            if parameter not in known:
                known.add(parameter)
                self.parameters.append(parameter)
        self._hook()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tells `subscriber` of every step from the next one on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stops telling `subscriber`."""
        self._subscribers.remove(subscriber)

    def close(self) -> None:
        """Takes every hook off; the source sees nothing from here on."""
        _remove(self._handles)

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        self.micro_batches = 0
        self.backwards_not_counted = 0
        self._inside = False
        self._hook()

    def zero_grad(self) -> None:
        """Empties `.grad` of every watched parameter and forgets the step."""
        for parameter in self.parameters:
            parameter.grad = None
        self.restart()

    @contextmanager
    def micro_batch(self, weight: float = 1.0) -> Iterator[None]:
        """Whatever is computed inside belongs to one micro-batch of this weight."""
        self._open(weight)
        try:
            yield
        except BaseException:
            self.restart()
            raise
        self._close()

    def require_unchanged(self, since: str) -> None:
        """Raises GradientError where somebody wrote to `.grad` after the last micro-batch."""
        if self._inside:
            self.restart()
            raise GradientError(
                "the last backward did not finish, so its gradient is incomplete; "
                "zero the gradients and repeat the step"
            )
        if self._stamp() != self._stamps:
            raise GradientError(
                f".grad was changed between the last counted backward and {since}; clip, zero or "
                "edit gradients, and run backwards of your own, outside the accumulation"
            )

    def stamp(self) -> None:
        """Accepts `.grad` as it is now, after a change that belongs to the step."""
        self._stamps = self._stamp()

    # what happens to a step

    def _gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if not self._inside:
            if self.explicit:
                self.backwards_not_counted += 1
                return
            self._open(1.0)
            Variable._execution_engine.queue_callback(self._close_backward)
        for subscriber in self._subscribers:
            subscriber.gradient(parameter, gradient)

    def _open(self, weight: float) -> None:
        if self.micro_batches and all(p.grad is None for p in self.parameters):
            self.restart()  # zero_grad() was called: what was accumulated is gone
        if self.micro_batches:
            self.require_unchanged("this one")
        else:
            self._require_one_rank()
            self._require_clean()
            for subscriber in self._subscribers:
                subscriber.begin()
        self._before = self._stamp()
        self._inside = True
        for subscriber in self._subscribers:
            subscriber.micro_batch(weight)

    def _close(self) -> None:
        self._inside = False
        self.micro_batches += 1
        self._stamps = self._stamp()
        for subscriber in self._subscribers:
            subscriber.end()

    def _close_backward(self) -> None:
        if self._stamp() == self._before:
            self.restart()
            raise GradientError(
                "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
                "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch"
            )
        self._close()

    # what is known of .grad

    def _stamp(self) -> list[_Stamp]:
        grads = (parameter.grad for parameter in self.parameters)
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def _require_clean(self) -> None:
        left = [p.grad for p in self.parameters if p.grad is not None and p.grad.numel()]
        if left and any(norm != 0 for norm in torch._foreach_norm(left, torch.inf)):
            raise GradientError(
                ".grad is not empty before the first backward of a step; call zero_grad() first"
            )

    def _require_one_rank(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise GradientError(
                f"{dist.get_world_size()} ranks found; this release measures on one process only"
            )

    # hooks

    def _hook(self) -> None:
        """Puts a hook on every parameter that requires a gradient and has none yet."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self._handles:
                hook = _hook_of(weakref.ref(self), weakref.ref(parameter))
                self._handles[parameter] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _hook_of(
    source: "weakref.ref[PlainSource]", parameter: "weakref.ref[Tensor]"
) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        watching, leaf = source(), parameter()
        if watching is not None and leaf is not None:
            watching._gradient(leaf, gradient)

    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save(model) stays silent
    return hook


def _remove(handles: dict[Tensor, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
