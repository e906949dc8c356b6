"""Gradients of plain tensors in one process: a hook on each leaf parameter."""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.dtypes import stacked
from bigbatch.gradients.gradient_hooks import accumulated_hook, gradient_hook, only_watched, remove
from bigbatch.gradients.protocols import Subscriber
from bigbatch.gradients.shard_indices import Held

# Which tensor .grad is, and how often it was written to. The tensor's own id would be free for the
# next tensor; its weak reference is one object while anybody holds it, here the last of the three.
_Stamp = tuple[int, int, weakref.ref[Tensor]] | None

MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)


class SingleProcessSource:
    """Watches leaf parameters with `Tensor.register_hook`; copies no gradient.

    By itself every `backward()` is one micro-batch. `explicit=True` counts only what happens
    inside `with source.micro_batch(weight)`, so that other backwards are not counted.

    It also holds what makes the numbers trustworthy: `.grad` is clean before the first
    micro-batch and is changed by nobody else until the last.
    """

    rank, ranks, replicas = 0, 1, 1
    lockstep = joined = False
    layout = 0
    _engine_writes = False  # whether an engine rewrites `.grad` between and after backwards
    _grad_may_wait = False  # whether a backward may leave `.grad` as it was

    def __init__(self, parameters: Iterable[Tensor], *, explicit: bool = False) -> None:
        self.explicit = explicit
        self.parameters: list[Tensor] = []
        self._others: dict[Tensor, None] = {}  # known, and not watched: only zeroed
        self._selected: list[Tensor] = []  # what was asked for last
        self.micro_batches = 0
        self.foreign_backward = False  # one outside changed .grad since the last micro-batch
        self._subscribers: list[Subscriber] = []
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._absorbers: dict[Tensor, RemovableHandle] = {}
        self._absorbed: dict[Tensor, Tensor] = {}  # .grad that autograd is not to see now
        self._edited = False  # .grad was, by what belongs to the step
        self._scaled = 1.0  # what it was multiplied by here
        self._whole: dict[Tensor, Tensor | None] | None = None  # what a `whole` one starts from
        self._begun = False  # whether the step has
        self._inside = False
        self._reached: set[Tensor] = set()  # by the present micro-batch
        self._by_itself = False  # whether a backward opened it, and not micro_batch()
        self._callback: weakref.ref[Callable[[], None]] | None = None  # alive while a backward runs
        self._stamps: list[_Stamp] = []
        self._before: list[_Stamp] = []
        weakref.finalize(self, remove, self._handles)
        weakref.finalize(self, remove, self._absorbers)
        self._closed = False
        self.add(parameters)

    def behind(self, trained: list[Tensor]) -> list[Tensor]:
        """They themselves."""
        return trained

    def shape(self, parameter: Tensor) -> torch.Size:
        """That of the parameter."""
        return parameter.shape

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters; those already watched are left as they are."""
        known = set(self.parameters)
        for parameter in parameters:
            if parameter.is_complex() and parameter.requires_grad:
                raise SettingError(
                    "a complex parameter cannot be measured; hold torch.view_as_real of it"
                )
            if parameter not in known:
                known.add(parameter)
                self.parameters.append(parameter)
                self._others.pop(parameter, None)
        self._hook()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these alone from now on; others that are known are zeroed with them, only."""
        asked, before = list(parameters), self._selected
        same = len(asked) == len(before) and all(map(operator.is_, asked, before))
        if same and len(asked) == len(self.parameters):
            self._hook()  # one may have been unfrozen
            return
        self._selected, chosen = asked, dict.fromkeys(asked)
        self.add([p for p in self._others if p in chosen])  # in the order of the model
        self.add(chosen)
        for parameter in [p for p in self.parameters if p not in chosen]:
            self._others[parameter] = None
            self._forget(parameter)
        self.parameters[:] = [p for p in self.parameters if p in chosen]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tells `subscriber` of every step from now on; between steps."""
        self._subscribers.append(subscriber)
        self._hook()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stops telling `subscriber`; with nobody left to tell, no hook stays on."""
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._unhook()
            self._hook()

    def close(self) -> None:
        """Takes every hook off; the source sees nothing from here on."""
        self._closed = True
        self._unhook()

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        self.micro_batches = 0
        self._begun = self.foreign_backward = self._edited = False
        self._scaled = 1.0
        self._inside = self._by_itself = False
        self._callback = self._whole = None
        self._absorbed.clear()
        self._hook()

    def zero_grad(self) -> None:
        """Empties `.grad` of every watched parameter and forgets the step."""
        for parameter in (*self.parameters, *self._others):
            parameter.grad = None
        self.restart()

    @contextmanager
    def micro_batch(self, weight: float = 1.0, *, whole: bool = False) -> Iterator[None]:
        """Whatever is computed inside belongs to one micro-batch of this weight.

        `whole` allows any number of backwards in it, for one copy of the gradient.
        """
        if self._inside and not self._by_itself:
            raise GradientError("micro_batch() was entered inside another; leave the first before")
        self._open(weight)
        try:
            if whole:
                self._whole = self._start_whole()
            yield
            if whole:
                self._emit_whole()
        except BaseException:
            self._put_back()
            self.restart()
            raise
        self._close(self._stamp())

    @contextmanager
    def idle(self) -> Iterator[None]:
        """What is computed inside adds zeros: it only keeps this rank in step with the others."""
        self._begin()  # a step in which there may be no micro-batch here
        yield
        self.foreign_backward = False
        self._stamps = self._stamp()

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

    def sum_of(self, parameter: Tensor) -> Tensor:
        """What `.grad` holds, without `scale`; in a `whole` micro-batch what it held before."""
        held = parameter.grad if self._whole is None else self._whole[parameter]
        assert held is not None
        held = held.detach() if held.requires_grad else held
        return held if self._scaled == 1.0 else held / self._scaled

    def absorb(self, parameter: Tensor) -> bool:
        """Whether the gradient is to be added by who asks; not where an engine or a graph is.

        Then autograd finds no `.grad`, leaves the gradient there without copying it, and what
        was there, the new sum, is put back. Nobody may look on meanwhile.
        """
        summed_here = self._whole is None and self._scaled == 1.0 and not self._engine_writes
        alone = len(parameter._backward_hooks or ()) == 1 and only_watched(parameter)
        if not (summed_here and alone) or torch.is_grad_enabled() or parameter.grad is None:
            return False
        if parameter not in self._absorbers:
            hook = accumulated_hook(weakref.WeakMethod(self._put_back_one))
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._absorbers[parameter] = handle
        self._absorbed[parameter] = parameter.grad
        return True

    @property
    def sums_intact(self) -> bool:
        """Whether `.grad` is what the micro-batches left there; never where an engine writes."""
        return not (self._engine_writes or self._edited) and self._stamp() == self._stamps

    def was_zeroed(self) -> bool:
        """Whether somebody emptied or zeroed every gradient since the last micro-batch."""
        return self._stamp() != self._stamps and self._is_clean()

    def is_finite(self) -> bool:
        """Whether every gradient is; waits for the device."""
        return all(bool(grad.isfinite().all()) for grad in self._grads())

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        grads = self._grads()
        if grads:  # a rank may have no piece of any
            torch._foreach_mul_(grads, factor)
        self._scaled *= factor
        self._stamps = self._stamp()

    def stamp(self) -> None:
        """Accepts `.grad` as it is now, after a change that belongs to the step."""
        self._edited = True
        self._stamps = self._stamp()

    # ranks: one process holds everything

    def local(self, parameter: Tensor) -> Tensor | None:
        """This rank's piece of the mean gradient."""
        return self._held(parameter)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor shaped like the whole gradient of `parameter`."""
        return whole

    def held(self, parameter: Tensor, count: int) -> Held:
        """All of the first `count` elements of a gradient."""
        return torch.arange(count, device="cpu"), torch.arange(count, device="cpu")

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place."""

    def synchronize(self, now: bool) -> None:
        """Whether the next backward joins the ranks' gradients, where that may wait."""

    # what happens to a step

    def _gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._inside and not self._subscribers:
            return  # nobody minds
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
        if gradient.layout != torch.strided or gradient.is_complex():
            raise GradientError(
                f"a {gradient.dtype} gradient of layout {gradient.layout} cannot be measured; use "
                "dense real gradients, for embeddings sparse=False"
            )
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._whole is None:
            self._emit(parameter, gradient)
            if parameter in self._absorbed:
                parameter.grad = None  # until the absorber, which is next but autograd
        else:
            self._gather_whole(parameter, gradient)

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        self._reached.add(parameter)
        for subscriber in self._subscribers:
            subscriber.gradient(parameter, gradient)

    def _when_backward_ends(self) -> None:
        """Queues a callback that the autograd engine keeps alive until the backward ends or fails.

        It queues another, which runs after those that DDP and FSDP2 queued to finish `.grad`.
        """
        kind = type(self)
        ended = kind._backward_ended if self._by_itself else kind._foreign_ended
        last = functools.partial(ended, self)
        callback = functools.partial(Variable._execution_engine.queue_callback, last)
        self._callback = weakref.ref(last)
        Variable._execution_engine.queue_callback(callback)

    def _open(self, weight: float) -> None:
        self._before = self._stamp()
        changed = self._inside or self._before != self._stamps
        if self.micro_batches and changed and not self.explicit and self._is_clean():
            self.restart()  # zero_grad() was called: what was accumulated is gone
        if self.micro_batches and changed and not self._engine_writes:
            self.require_unchanged("this one")
        if self.micro_batches and self.explicit and self._engine_writes:
            self._require_undisturbed()
        self._begin()
        self._reached.clear()
        self._inside, self.foreign_backward = True, False
        for subscriber in self._subscribers:
            subscriber.micro_batch(weight)

    def _begin(self) -> None:
        """The step, if it has not begun."""
        if self._begun:
            return
        self._hook()
        self._require_known_ranks()
        if not self._is_clean():
            raise GradientError(
                ".grad is not empty before the first backward of a step; call zero_grad() first"
            )
        self._begun = True
        for subscriber in self._subscribers:
            subscriber.begin()

    def _require_undisturbed(self) -> None:
        """What can be told of gradients that an engine writes to, without asking the device."""
        if self.foreign_backward or (any(self._stamps) and not any(self._before)):
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _close(self, stamps: list[_Stamp]) -> None:
        if self._absorbed:
            self._put_back()
            self._refuse_autograd_grad()
        self._inside = self._by_itself = False
        self.micro_batches += 1
        self._stamps = stamps
        seen = self._handles if self._engine_writes else self._reached
        for parameter, before, after in zip(
            self.parameters, self._before, self._stamps, strict=True
        ):
            if self._subscribers and before != after and parameter not in seen:
                self.restart()
                raise GradientError(
                    "a parameter received a gradient that was not seen: it was unfrozen, or its "
                    "hooks were removed, after the step began; do that between steps"
                )
        for subscriber in self._subscribers:
            subscriber.end()

    @_disable_dynamo
    def _foreign_ended(self) -> None:
        self.foreign_backward |= self._stamp() != self._stamps

    @_disable_dynamo
    def _backward_ended(self) -> None:
        now = self._stamp()
        if self._before == now and not self._grad_may_wait:
            self._refuse_autograd_grad()
        self._close(now)

    def _put_back_one(self, parameter: Tensor) -> None:
        """Autograd has left the micro-batch's gradient where the sum was."""
        if parameter in self._absorbed:
            parameter.grad = self._absorbed.pop(parameter)

    def _put_back(self) -> None:
        for parameter in list(self._absorbed):
            self._put_back_one(parameter)

    def _refuse_autograd_grad(self) -> None:
        self.restart()
        if are_freed(self.parameters):
            raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )

    # a micro-batch of several backwards: what it adds is a difference of .grad

    def _start_whole(self) -> dict[Tensor, Tensor | None]:
        return {p: None if p.grad is None else p.grad.clone() for p in self.parameters}

    def _gather_whole(self, parameter: Tensor, gradient: Tensor) -> None:
        """One of its backwards reached the parameter."""

    @torch.no_grad()
    def _emit_whole(self) -> None:
        assert self._whole is not None
        for (p, before), was, now in zip(
            self._whole.items(), self._before, self._stamp(), strict=True
        ):
            if p.grad is not None and was != now:
                grad = p.grad.detach()
                self._emit(p, grad if before is None else grad - before)
        self._whole = None

    # what is known of .grad

    def _stamp(self) -> list[_Stamp]:
        return [
            None
            if p.grad is None or (piece := self._held(p)) is None
            else (id(ref := weakref.ref(p.grad)), p.grad._version + piece._version, ref)
            for p in self.parameters
        ]

    def _grads(self) -> list[Tensor]:
        return [grad for p in self.parameters if (grad := self._held(p)) is not None]

    def _held(self, parameter: Tensor) -> Tensor | None:
        """What this rank holds of `.grad`."""
        return parameter.grad

    def _is_clean(self) -> bool:
        """Whether every `.grad` is None, or zero, which alone costs a look."""
        return all_zero(self._grads())

    def _require_known_ranks(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise GradientError(
                f"{dist.get_world_size()} ranks found, and a model that none of them shares; wrap "
                "it in DistributedDataParallel or fully_shard, and hand over the wrapped model"
            )

    # hooks

    @property
    def _listens(self) -> bool:
        return bool(self._subscribers) and not self._closed

    def _sentinel(self, trained: list[Tensor]) -> list[Tensor]:
        """Where nobody listens, the one that still shows a backward outside `micro_batch`."""
        return trained[-1:] if self.explicit and not self._closed else []

    def _forget(self, parameter: Tensor) -> None:
        """Takes the hooks off one that is not watched any more."""
        for handles in (self._handles, self._absorbers):
            if parameter in handles:
                handles.pop(parameter).remove()

    def _unhook(self) -> None:
        remove(self._handles)
        remove(self._absorbers)

    def _hook(self) -> None:
        """Puts a hook on every parameter that requires a gradient and has none yet."""
        trained = [p for p in self.parameters if p.requires_grad]
        for parameter in trained if self._listens else self._sentinel(trained):
            if parameter not in self._handles:
                hook = gradient_hook(weakref.WeakMethod(self._gradient), weakref.ref(parameter))
                self._handles[parameter] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine has taken the memory of one, which it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)


def all_zero(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing but zeros is in them; waits for the device once, if there is anything."""
    left = [tensor for tensor in tensors if tensor.numel()]
    return not left or not bool(stacked(torch._foreach_norm(left, torch.inf)).any())
