"""Gradients of plain tensors in one process: a hook on each leaf parameter."""

import functools
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
        self.foreign_backward = False  # one outside changed .grad since the last micro-batch
        self._subscribers: list[Subscriber] = []
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._inside = False
        self._reached: set[Tensor] = set()  # by the present micro-batch
        self._by_itself = False  # whether a backward opened it, and not micro_batch()
        self._callback: weakref.ref[Callable[[], None]] | None = None  # alive while a backward runs
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
        self.foreign_backward = False
        self._inside = self._by_itself = False
        self._callback = None
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
        """Raises GradientError where no step is measured, or `.grad` was written to since."""
        if self._inside:
            self.restart()
            raise GradientError(
                "the last backward did not finish, so its gradient is incomplete; "
                "zero the gradients and repeat the step"
            )
        if not self.micro_batches:
            raise GradientError(
                f"0 micro-batches were seen before {since}; call backward() at least twice, after "
                "the meter or optimizer is made and after zero_grad()"
            )
        if self._stamp() != self._stamps:
            raise GradientError(
                f".grad was changed between the last counted backward and {since}; clip, zero or "
                "edit gradients, and run backwards of your own, outside the accumulation"
            )

    def was_zeroed(self) -> bool:
        """Whether somebody emptied or zeroed every gradient since the last micro-batch."""
        return self._stamp() != self._stamps and self._is_clean()

    def is_finite(self) -> bool:
        """Whether every gradient is; waits for the device."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return all(bool(grad.isfinite().all()) for grad in grads)

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(grads, factor)
        self.stamp()

    def stamp(self) -> None:
        """Accepts `.grad` as it is now, after a change that belongs to the step."""
        self._stamps = self._stamp()

    # what happens to a step

    @torch.no_grad()
    def _gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        begins = self._callback is None or self._callback() is None
        if begins and self._by_itself:
            self.restart()  # the backward before this one failed
        if begins and not self._inside:
            if not self.explicit:
                self._open(1.0)
                self._by_itself = True
            self._when_backward_ends()
        if not self._inside:
            return
        if gradient.layout != torch.strided:
            raise GradientError(
                f"a gradient of layout {gradient.layout} cannot be measured; use dense gradients, "
                "for embeddings sparse=False"
            )
        self._reached.add(parameter)
        for subscriber in self._subscribers:
            subscriber.gradient(parameter, gradient)

    def _when_backward_ends(self) -> None:
        """Queues a callback that the engine keeps alive until the backward ends or fails."""
        ended = PlainSource._backward_ended if self._by_itself else PlainSource._foreign_ended
        callback = functools.partial(ended, self)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    def _open(self, weight: float) -> None:
        self._before = self._stamp()
        changed = self._inside or self._before != self._stamps
        if self.micro_batches and changed and not self.explicit and self._is_clean():
            self.restart()  # zero_grad() was called: what was accumulated is gone
        if self.micro_batches and changed:
            self.require_unchanged("this one")
        if not self.micro_batches:
            self._hook()
            self._require_one_rank()
            if not self._is_clean():
                raise GradientError(
                    ".grad is not empty before the first backward of a step; call zero_grad() first"
                )
            for subscriber in self._subscribers:
                subscriber.begin()
        self._reached.clear()
        self._inside, self.foreign_backward = True, False
        for subscriber in self._subscribers:
            subscriber.micro_batch(weight)

    def _close(self) -> None:
        self._inside = self._by_itself = False
        self.micro_batches += 1
        self._stamps = self._stamp()
        for parameter, before, after in zip(
            self.parameters, self._before, self._stamps, strict=True
        ):
            if before != after and parameter not in self._reached:
                raise GradientError(
                    "a parameter received a gradient that was not seen: it was unfrozen, or its "
                    "hooks were removed, after the step began; do that between steps"
                )
        for subscriber in self._subscribers:
            subscriber.end()

    def _foreign_ended(self) -> None:
        self.foreign_backward |= self._stamp() != self._stamps

    def _backward_ended(self) -> None:
        if self._before == self._stamp():
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

    def _is_clean(self) -> bool:
        """Whether every `.grad` is None, or zero, which alone costs a look."""
        left = [p.grad for p in self.parameters if p.grad is not None and p.grad.numel()]
        return not left or all(norm == 0 for norm in torch._foreach_norm(left, torch.inf))

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
