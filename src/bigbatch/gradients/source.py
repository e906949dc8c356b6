"""A model's micro-batch gradients: seen by a tap, guarded in `.grad`, reduced over ranks."""

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

from bigbatch.errors import GradientError
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.gradient_hooks import weakly
from bigbatch.gradients.protocols import GradientTap, Subscriber
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.shard_indices import ShardIndices

MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)


class GradientSource:
    """Reports each micro-batch's gradient to its subscribers, and checks `.grad` meanwhile.

    By itself every `backward()` is one micro-batch. `explicit=True` counts only what happens
    inside `with source.micro_batch(weight)`, and no other backward.

    An engine is supported by choosing the three parts; `gradients/ddp.py` is an example.

    Args:
        parameters: that are watched.
        tap: sees gradients.
        guard: knows what this rank holds of `.grad`, and whether anybody else wrote to it.
        reducer: knows the ranks.
        explicit: as above.
        on_zero_grad: called by `zero_grad`, for what an engine keeps outside `.grad`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        tap: GradientTap,
        guard: GradGuard,
        reducer: RankReducer,
        *,
        explicit: bool = False,
        on_zero_grad: Callable[[], None] | None = None,
    ) -> None:
        self.explicit = explicit
        self.reducer = reducer
        self.parameters: list[Tensor] = guard.parameters
        self.micro_batches = 0  # complete ones since the step began, on this rank
        self.foreign_backward = False  # one outside changed .grad since the last micro-batch
        self._tap, self._guard = tap, guard
        self._on_zero_grad = on_zero_grad
        self._unwatched: dict[Tensor, None] = {}  # known, and only zeroed
        self._selected: list[Tensor] = []  # by the last `select`
        self._subscribers: list[Subscriber] = []
        self._earlier: dict[Tensor, Tensor | None] | None = None  # .grad before a `whole` one
        self._gathered: dict[Tensor, Tensor] | None = None  # of a `whole` one under an engine
        self._begun = False  # whether the step has
        self._inside = False  # a micro-batch
        self._by_itself = False  # whether a backward opened it, and not micro_batch()
        self._reached: set[Tensor] = set()  # by the current micro-batch
        self._callback: weakref.ref[Callable[[], None]] | None = None  # alive while a backward runs
        self._closed = False
        self._report = weakly(self._gradient)
        self.add(parameters)

    # the ranks

    @property
    def rank(self) -> int:
        """Of this process among those that share the step."""
        return self.reducer.rank

    @property
    def ranks(self) -> int:
        """How many processes share the step."""
        return self.reducer.ranks

    @property
    def replicas(self) -> int:
        """How many ranks have the same `local_grad` of every parameter."""
        return self.reducer.replicas

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place."""
        self.reducer.all_reduce(values)

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of the reduced gradient, at the end of a step.

        It is that of `.grad`, unless an optimizer has replaced that.
        """
        return self.reducer.local(parameter, self._guard.local(parameter))

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a tensor shaped like the whole gradient of `parameter`."""
        return self.reducer.shard(parameter, whole)

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a whole gradient `local_grad` holds."""
        return self.reducer.shard_indices(parameter, count)

    # what is watched, and who reads it

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, between steps.

        Raises:
            SettingError: one whose gradient cannot be seen.
        """
        known = set(self.parameters)
        for parameter in parameters:
            self._tap.require_supported(parameter)
            if parameter not in known:
                known.add(parameter)
                self.parameters.append(parameter)
                self._unwatched.pop(parameter, None)
        self._hook()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these alone, between steps; others that are known are only zeroed with them."""
        asked, previous = list(parameters), self._selected
        same = len(asked) == len(previous) and all(map(operator.is_, asked, previous))
        if same and len(asked) == len(self.parameters):
            self._hook()  # one may have been unfrozen
            return
        self._selected, chosen = asked, dict.fromkeys(asked)
        self.add([p for p in self._unwatched if p in chosen])  # in the order of the model
        self.add(chosen)
        for parameter in [p for p in self.parameters if p not in chosen]:
            self._unwatched[parameter] = None
            self._tap.detach(parameter)
            self._guard.forget(parameter)
        self.parameters[:] = [p for p in self.parameters if p in chosen]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Reports every step from now on to `subscriber`; between steps."""
        self._subscribers.append(subscriber)
        self._hook()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stops reporting to `subscriber`; without subscribers no hook stays on."""
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._unhook()
            self._hook()

    def close(self) -> None:
        """Removes every hook; the source sees nothing from now on."""
        self._closed = True
        self._unhook()

    # the step

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        self.micro_batches = 0
        self._begun = self.foreign_backward = False
        self._inside = self._by_itself = False
        self._callback = self._earlier = self._gathered = None
        self._guard.restart()
        self._hook()

    def zero_grad(self) -> None:
        """Sets every gradient to None and forgets the step."""
        for parameter in (*self.parameters, *self._unwatched):
            parameter.grad = None
        self.restart()
        if self._on_zero_grad is not None:
            self._on_zero_grad()

    @contextmanager
    def micro_batch(self, weight: float = 1.0, *, whole: bool = False) -> Iterator[None]:
        """Counts whatever is computed inside as one micro-batch of this weight.

        Args:
            weight: n_d.
            whole: allows any number of backwards inside, for one copy of the gradient.
        """
        if self._inside and not self._by_itself:
            raise GradientError("micro_batch() was entered inside another; leave the first before")
        self._open(weight)
        try:
            if whole:
                self._start_whole()
            yield
            if whole:
                self._emit_whole()
        except BaseException:
            self._guard.put_back()
            self.restart()
            raise
        self._close(self._guard.stamps())

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Runs a backward of zeros, which only keeps this rank in step with the others."""
        self._begin()  # a step in which this rank may have no micro-batch
        yield
        self.foreign_backward = False
        self._guard.accept()

    def synchronize(self, now: bool) -> None:
        """Sets whether the next backward reduces the gradients; before its forward."""
        self.reducer.synchronize(now)

    # what is read of .grad

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
        if self._guard.changed():
            raise GradientError(
                f".grad was changed between the last counted backward and {since}; clip, zero or "
                "edit gradients, and run backwards of your own, outside the accumulation"
            )

    def grad_sum(self, parameter: Tensor) -> Tensor:
        """This rank's part of the sum of what the complete micro-batches added to `.grad`.

        Read only. Correct where `sums_intact`, during a backward too.
        """
        return self._guard.grad_sum(parameter, self._earlier)

    def defer_accumulation(self, parameter: Tensor) -> bool:
        """Whether the subscriber has to add the gradient it was given to `grad_sum` itself.

        For one that reads and writes there anyway, so that autograd need not do so again. Asked in
        `gradient`, once; a yes is binding.
        """
        return self._earlier is None and self._guard.defer_accumulation(parameter)

    @property
    def sums_intact(self) -> bool:
        """Whether `grad_sum` is what the micro-batches left."""
        return self._guard.sums_intact

    def was_zeroed(self) -> bool:
        """Whether somebody emptied or zeroed every gradient since the last micro-batch."""
        return self._guard.changed() and self._guard.is_clean_within_step()

    def is_finite(self) -> bool:
        """Whether every gradient is; waits for the device."""
        return self._guard.is_finite()

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        self._guard.scale(factor)
        self.reducer.scaled(factor)

    def accept_grads(self) -> None:
        """Takes the gradients as they are now, after a change that belongs to the step."""
        self._guard.accept_edit()

    # one backward

    def _gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._inside and not self._subscribers:
            return  # nobody reads it
        begins = self._callback is None or self._callback() is None
        if begins and self._by_itself:
            self.restart()  # the previous backward failed
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
        if self._gathered is not None:
            total = self._gathered.get(parameter)
            self._gathered[parameter] = gradient.clone() if total is None else total.add_(gradient)
        elif self._earlier is None:
            self._emit(parameter, self._guard.added(parameter, gradient))
            self._guard.reported(parameter, gradient)

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
        changed = self._guard.open() or self._inside
        may_be_zeroed = self.micro_batches and changed and not self.explicit
        if may_be_zeroed and self._guard.is_clean_within_step():
            self.restart()  # zero_grad() was called: what was accumulated is gone
        if self.micro_batches and changed and not self._guard.engine_writes:
            self.require_unchanged("this one")
        if self.micro_batches and self.explicit and self._guard.engine_writes:
            self._require_undisturbed()
        self._begin()
        self._reached.clear()
        self._inside, self.foreign_backward = True, False
        for subscriber in self._subscribers:
            subscriber.micro_batch(weight)

    def _begin(self) -> None:
        """Begins the step, once."""
        if self._begun:
            return
        self._hook()
        self._require_known_ranks()
        self._guard.begin(foreign_backward=self.foreign_backward)
        self._begun = True
        for subscriber in self._subscribers:
            subscriber.begin()

    def _require_known_ranks(self) -> None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and self.reducer.unshared:
            raise GradientError(self.reducer.unshared.format(ranks=ranks))

    def _require_undisturbed(self) -> None:
        """Checks gradients that an engine writes to, without waiting for the device."""
        if self.foreign_backward or self._guard.zeroed_since():
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _close(self, stamps: list[Stamp]) -> None:
        if self._guard.put_back():
            self._refuse_autograd_grad()
        self._inside = self._by_itself = False
        self.micro_batches += 1
        self._guard.accept(stamps)
        if self._subscribers:
            self._require_seen(self._guard.written_to(stamps))
        for subscriber in self._subscribers:
            subscriber.end()

    def _require_seen(self, written: list[Tensor]) -> None:
        """An engine may write to the gradient of a parameter that this rank did not reach."""
        by_engine = self._guard.engine_writes
        is_seen = self._tap.is_hooked if by_engine else self._reached.__contains__
        if not all(map(is_seen, written)):
            self.restart()
            raise GradientError(
                "a parameter received a gradient that was not seen: it was unfrozen, or its "
                "hooks were removed, after the step began; do that between steps"
            )

    @_disable_dynamo
    def _foreign_ended(self) -> None:
        self.foreign_backward |= self._guard.changed_by_foreign_backward()

    @_disable_dynamo
    def _backward_ended(self) -> None:
        now = self._guard.stamps()
        if self._guard.before == now and not self._guard.grad_may_wait:
            self._refuse_autograd_grad()
        self._close(now)

    def _refuse_autograd_grad(self) -> None:
        self.restart()
        if are_freed(self.parameters):
            raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )

    # a micro-batch of several backwards

    def _start_whole(self) -> None:
        """Where an engine writes, a difference of `.grad` may hold other ranks' share."""
        if self._guard.engine_writes:
            self._gathered = {}
        else:
            self._earlier = self._guard.copies()

    @torch.no_grad()
    def _emit_whole(self) -> None:
        for parameter, total in (self._gathered or {}).items():
            self._emit(parameter, total)
        earlier = self._earlier or {}
        written = set(self._guard.written_to()) if earlier else ()
        for parameter, before in earlier.items():
            if parameter.grad is not None and parameter in written:
                grad = parameter.grad.detach()
                self._emit(parameter, grad if before is None else grad - before)
        self._earlier = self._gathered = None

    # hooks

    def _unhook(self) -> None:
        self._tap.close()
        self._guard.close()

    def _hook(self) -> None:
        """Hooks every parameter that requires a gradient.

        Without subscribers one leaf hook stays on, which shows a backward outside `micro_batch`.
        """
        if self._closed:
            return
        if self._subscribers:
            self._tap.attach(self.parameters, self._report)
        elif self.explicit and self._tap.on_leaves:
            self._tap.attach([p for p in self.parameters if p.requires_grad][-1:], self._report)


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine has freed the memory of one, which it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)
