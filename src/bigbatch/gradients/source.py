"""A model's micro-batch gradients, reported to subscribers; `.grad` is checked meanwhile."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.float32_sums import Float32Sums
from bigbatch.gradients.grad_guard import GradGuard, is_tensor, require_dense
from bigbatch.gradients.gradient_hooks import (
    current_backward,
    follows,
    hands_errors_over,
    is_nested,
    remove_hooks,
    watching_hook,
    weak_method,
    weakly,
)
from bigbatch.gradients.groups.group_norms import GroupNorms
from bigbatch.gradients.groups.group_tap import GroupTap, refusal_message
from bigbatch.gradients.protocols import Engine, MicroBatchGradients, Subscriber
from bigbatch.gradients.rank_reducer import RankReducer

TWICE = (
    "a parameter received two gradients in one micro-batch (reentrant checkpointing, which "
    "use_reentrant=False avoids?); mark the micro-batches with `with meter.micro_batch():`"
)
MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)
_NESTED = (
    "a backward inside another one reached the parameters first (reentrant checkpointing of the "
    "whole model, which use_reentrant=False avoids?), so the end of the micro-batch is unknown; "
    "mark the micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch"
)

_SMALL = 1 << 14  # elements; for fewer, a call costs more than the read


class MicroBatch:
    """A micro-batch of a source: a backward, or what happens inside `with`."""

    def __init__(self, source: "GradientSource", weight: float = 1.0, several: bool = False):
        self._source, self._weight = source, weight
        self.several = several  # whether it may have several backwards
        self.implicit = False  # whether a backward opened it
        self.reached: dict[int, Tensor] = {}  # parameters, by their ids
        # gradients to report at its end; detached, torch would write into their memory
        self.gathered: dict[Tensor, Tensor] = {}
        self._announced = False  # whether the subscribers know of it

    def __enter__(self) -> None:
        current = self._source._current
        if current is not None and current.implicit:  # of a backward that failed
            self._source._end_failed()
        self.reached, self.gathered, self._announced = {}, {}, False  # of an earlier `with`
        self._source._open(self)

    def __exit__(self, kind: object, *_: object) -> None:
        is_complete = False
        try:
            if kind is None:
                self._source._close(self)
                is_complete = True
        finally:
            if not is_complete:
                self._source._abandon()
                self._source._restart()

    def announce(self) -> None:
        """Announces it to the subscribers, once it is known to be one."""
        if self._announced:
            return
        self._announced = True
        tap = self._source.group_tap
        groups = 1 if tap is None or tap.grouping is None else len(tap.weights)
        for subscriber in self._source._subscribers:
            subscriber.micro_batch(self._weight, groups)

    def report(self, batch: MicroBatchGradients) -> None:
        """Hands gradients to the subscribers, and what its groups add."""
        self.announce()
        self.reached.update(zip(map(id, batch.parameters), batch.parameters, strict=True))
        tap, subscribers = self._source.group_tap, self._source._subscribers
        for subscriber in subscribers:
            subscriber.gradients(batch)
        if tap is None or tap.grouping is None:
            return
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            groups = tap.take(parameter, gradient)
            if groups is not None and len(groups.weights) > 1:  # one group is the gradient itself
                for subscriber in subscribers:
                    subscriber.groups(parameter, gradient, groups)


class GradientSource:
    """Reports each micro-batch's gradient to its subscribers, and checks `.grad` meanwhile.

    Its hooks see gradients before an engine reduces them. An engine is supported by a subclass with
    its hooks, a guard and a reducer; `gradients/ddp.py` is an example.

    Args:
        parameters: the parameters to watch.
        guard: reads `.grad` on this rank, and notices who else writes to it.
        reducer: communicates, and knows which shard of the mean gradient each rank has.
    """

    explicit = False
    """Whether only what happens inside `micro_batch` counts; else each backward is one."""
    on_leaves = True
    """Whether hooks are on the parameters themselves, so that one shows any backward."""
    keeps_sums = False
    """Whether it has S, the sum of what the complete micro-batches added."""
    gathers = False
    """Whether gradients that hooks see are added up, and reported at the end of a micro-batch."""
    engine: Engine | None = None
    """What runs backwards and optimizer steps, if it is not torch."""
    mixes = False
    """Whether several micro-batches are open at a time, as a pipeline's schedule mixes them."""
    hides = False
    """Whether it reads gradients from `.grad`, which is empty when a backward starts."""
    float32_refusal = "its engine adds them up itself"
    """Why gradients of half types cannot be added up in float32; empty if they can."""

    def __init__(
        self, parameters: Iterable[Tensor], guard: GradGuard, reducer: RankReducer
    ) -> None:
        self.guard, self.reducer = guard, reducer
        self.rank, self.ranks = reducer.rank, reducer.ranks
        self.process, self.processes = reducer.process, reducer.processes
        # whether this process adds what all processes of its rank know, to a sum over them
        self.is_first = self.process % (self.processes // self.ranks) == 0
        self.parameters: list[Tensor] = guard.parameters
        self._unwatched: dict[Tensor, None] = {}  # parameters that are only zeroed
        self._subscribers: list[Subscriber] = []
        self._reads_at_once = False  # whether one of them wants each gradient as it comes
        self.on_error: Callable[[Exception], None] | None = None  # see `hands_errors_over`
        self.failed = False
        self._handles: dict[Any, RemovableHandle] = {}  # of its hooks, by what they are on
        weakref.finalize(self, remove_hooks, self._handles)
        self._closed = False
        self._step_begun = False
        self.micro_batches = 0  # complete micro-batches of the step on this rank
        self._current: MicroBatch | None = None  # the one that is not complete
        self._backward: weakref.ref[Any] | None = None  # to an object that lives as long as it
        self._backward_number = -1  # torch's
        self.foreign_backward = False  # an uncounted backward wrote to .grad since the last one
        self.float32_sums: Float32Sums | None = None  # if gradients of half types have them
        self.group_tap: GroupTap | None = None  # if a backward is cut into groups
        # of the groups of each micro-batch of the step; None if it has none
        self.group_norms: list[GroupNorms | None] = []
        self.add(parameters)

    # hooks

    def _attach_hooks(self) -> None:
        """Hooks every parameter to train; without subscribers one, which shows other backwards."""
        if self._closed:
            return
        trained = [p for p in self.parameters if p.requires_grad]
        if not self._subscribers:
            trained = trained[-1:] if self.explicit and self.on_leaves else []
        for parameter in trained:
            if parameter not in self._handles:
                self._handles[parameter] = self._register(parameter, parameter)

    def _register(self, leaf: Tensor, parameter: Tensor) -> RemovableHandle:
        """Hooks the leaf of which an engine computes the parameter's gradient."""
        hook = watching_hook(weakly(weak_method(self._on_gradient), parameter))
        return leaf.register_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    def _watched(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The watched parameters of leaves of the graph; None for one of another's."""
        watched = set(map(id, self.parameters))
        return [leaf if id(leaf) in watched else None for leaf in leaves]

    # what is watched, and who reads it

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, between steps."""
        watched = set(self.parameters)
        for parameter in parameters:
            if parameter.is_complex() and parameter.requires_grad:
                raise SettingError(
                    "a complex parameter cannot be measured; hold torch.view_as_real of it"
                )
            if parameter not in watched:
                watched.add(parameter)
                self.parameters.append(parameter)
                self._unwatched.pop(parameter, None)
        self._attach_hooks()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these parameters alone, between steps; `zero_grad` still zeroes the others."""
        selected = dict.fromkeys(parameters)
        self.add([*filter(selected.__contains__, self._unwatched), *selected])  # in model order
        for parameter in [p for p in self.parameters if p not in selected]:
            self._unwatched[parameter] = None
            if parameter in self._handles:
                self._handles.pop(parameter).remove()
        self.parameters[:] = [p for p in self.parameters if p in selected]
        self._attach_hooks()

    def cut_backwards(
        self, groups: int, layers: Mapping[Tensor, int], model: nn.Module | None = None
    ) -> None:
        """Also reports the gradients of so many groups of samples in each prepared backward."""
        watched = weak_method(self._watched)
        self.group_tap = GroupTap(groups, watched, layers, model, checks_samples=self.on_leaves)
        self._attach_hooks()

    def add_in_float32(self, enabled: bool) -> None:
        """Whether gradients of half types are added up in float32 from the next step on."""
        if not enabled:
            if self.float32_sums is not None:
                self.float32_sums.detach()
            self.float32_sums = None
            return
        if self.float32_sums is None:
            self.float32_sums = Float32Sums(weak_method(self._is_in_micro_batch))
        self.float32_sums.attach(self.parameters)

    def _is_in_micro_batch(self) -> bool:
        return self._current is not None

    def prepare_groups(
        self,
        roots: Iterable[Tensor],
        samples: int,
        sample_weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        """The backward of `roots` is next; see `GroupTap.prepare`."""
        if self.group_tap is not None and self._subscribers:
            if current_backward() < 0:
                self._backward = None  # of a failed one, autograd may keep the end a little longer
            self.group_tap.exact = any(s.needs_exact_groups for s in self._subscribers)
            self.group_tap.prepare(roots, samples, sample_weights)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Reports every later step to `subscriber`; call it between steps."""
        self._subscribers.append(subscriber)
        self._reads_at_once |= subscriber.reads_at_once
        self._attach_hooks()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stops reporting to `subscriber`; without subscribers no hook stays on."""
        self._subscribers.remove(subscriber)
        self._reads_at_once = any(other.reads_at_once for other in self._subscribers)
        if not self._subscribers:
            remove_hooks(self._handles)
            self._attach_hooks()

    def close(self) -> None:
        """Removes every hook for good."""
        self._closed = True
        if self.group_tap is not None:
            self.group_tap.forget()
        remove_hooks(self._handles)

    # the step

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        if self.group_tap is not None:
            self.group_tap.forget()
        self._restart()

    def _restart(self) -> None:
        """The same in a backward, which keeps what it prepared."""
        self.micro_batches, self.group_norms = 0, []
        self._current = self._backward = None
        self._step_begun = self.foreign_backward = self.failed = False
        self.guard.restart()
        if self.float32_sums is not None:
            self.float32_sums.restart()
        if self._subscribers:
            self._attach_hooks()

    def zero_grad(self) -> None:
        """Sets every gradient to None and forgets the step."""
        for parameter in (*self.parameters, *self._unwatched):
            parameter.grad = None
        self.restart()

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        self.guard.scale(factor)
        self.reducer.shards.after_scale(factor)

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of the reduced gradient, also if an optimizer has replaced `.grad`."""
        return self.reducer.shards.local_grad(parameter, self.guard.local_grad(parameter))

    def local_grads(self) -> list[Tensor]:
        """Every reduced gradient of this process, also copies of what its group has."""
        grads: Any = map(self.guard.local_grad, self.parameters)
        if (shards := self.reducer.shards) is not self.reducer:
            grads = map(shards.local_grad, self.parameters, grads)
        return list(filter(is_tensor, grads))

    def clip_grad_norm_(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Clips the gradients by their norm over all processes; returns that."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def copied_grads(self) -> list[Tensor | None]:
        """The gradients of which each process of a tensor-parallel group has a copy."""
        return []

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter; None where no micro-batch reached it, or S is not kept."""
        return list(map(self._sum_of, parameters))

    def _sum_of(self, parameter: Tensor) -> Tensor | None:
        """S, also in a backward, before its gradient is added; None before the first."""
        return None

    def require_finished(self) -> None:
        """Raises GradientError where the last backward has failed, and nothing was zeroed since."""
        if self._current is not None:
            raise GradientError(
                "the last backward did not finish, so its gradient is incomplete; zero the "
                "gradients and repeat the step; or it ran in compiled autograd, which calls no "
                "hook at its end and cannot be measured"
            )

    def require_unchanged(self, caller: str) -> None:
        """Raises GradientError where no step is measured, or `.grad` was written to since."""
        self.require_finished()
        if not self.micro_batches:
            raise GradientError(
                f"0 micro-batches were seen before {caller}; call backward() at least twice, after "
                "the meter or optimizer is made and after zero_grad()"
            )
        if self.guard.changed():
            raise GradientError(
                f".grad was changed between the last counted backward and {caller}; clip, zero or "
                "edit gradients, run backwards of your own, and add parameters, outside the "
                "accumulation"
            )

    def _begin_step(self) -> None:
        self._attach_hooks()
        self.reducer.require_shared()
        self.guard.begin()
        self._step_begun = True
        for subscriber in self._subscribers:
            subscriber.begin()

    def refuse_groups(self, reason: str) -> None:
        """Raises GradientError if there is a reason why the groups of the step cannot be used."""
        if reason:
            self.restart()
            raise GradientError(f"{reason}; measure by micro-batches instead, groups=None")

    def require_no_step_in_backward(self) -> None:
        """Raises GradientError where a hook of the user's may take gradients in a backward."""
        hooks = [h for p in self.parameters for h in (p._post_accumulate_grad_hooks or {}).values()]
        # those of DeepSpeed only move gradients to its shards
        modules = [getattr(h, "__module__", "") for h in hooks if not hasattr(h, "only_watches")]
        if not all(module.startswith("deepspeed.") for module in modules):
            raise GradientError(
                ".grad is lost within a backward: an optimizer that steps there, in a hook of "
                "register_post_accumulate_grad_hook, steps before the micro-batches are summed; "
                "remove the hook, and step once after the last backward"
            )

    # a micro-batch

    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> AbstractContextManager[None]:
        """Counts what is computed inside as one micro-batch.

        Args:
            weight: n_d.
            several_backwards: allows any number of backwards.
        """
        if self._current is not None and not self._current.implicit:
            raise GradientError("micro_batch() was entered inside another; leave the first before")
        return MicroBatch(self, weight, several_backwards)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Runs a backward of zeros, which only keeps this rank in step with the other ranks."""
        if not self._step_begun:  # in which this rank may have no micro-batch
            self._begin_step()
        yield
        self.foreign_backward = False
        self.guard.accept()

    def _open(self, opened: MicroBatch) -> None:
        changed = self.guard.open_micro_batch() or self._current is not None
        may_be_zeroed = self.micro_batches and changed and not self.explicit
        if may_be_zeroed and self.guard.is_clean_within_step():
            self._restart()  # the user called zero_grad(), and starts a new step
        if self.micro_batches:
            self._require_undisturbed(changed=changed)
        if not self._step_begun:
            self._begin_step()
        self._current, self.foreign_backward = opened, False

    def _require_undisturbed(self, *, changed: bool) -> None:
        """Checks gradients that an engine writes to, without waiting for the device."""
        if self.explicit and (self.foreign_backward or self.guard.all_set_to_none()):
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _close(self, current: MicroBatch) -> None:
        stamps = self.guard.stamps()
        if not any(stamps) and not self.guard.grad_may_wait:
            self.require_no_step_in_backward()
        if self._subscribers:
            self._require_seen(current, self.guard.written_parameters(stamps))
        if current.gathered:
            gathered = current.gathered
            current.report(MicroBatchGradients([*gathered], [*gathered.values()]))
        self.guard.accept(stamps)
        self._end_micro_batch(current)

    def _require_seen(self, current: MicroBatch, written_parameters: list[Tensor]) -> None:
        """An engine may write to the gradient of a parameter that this rank did not reach."""
        if not all(map(self._handles.__contains__, written_parameters)):
            raise GradientError(
                "a parameter received a gradient that was not seen: it was unfrozen, or its "
                "hooks were removed, after the step began; do that between steps"
            )

    def _end_micro_batch(self, current: MicroBatch) -> None:
        current.announce()
        self._current = None
        self.micro_batches += 1
        self.group_norms.append(None)
        if (tap := self.group_tap) is not None and tap.grouping is not None:
            unseen = {p: why for p, why in tap.refusals.items() if id(p) in current.reached}
            self.group_norms[-1] = tap.end()
            if unseen:  # every parameter that the backward reached must have had its groups
                self.refuse_groups(refusal_message(unseen, tap.model))
        for subscriber in self._subscribers:
            subscriber.end()

    def _abandon(self) -> None:
        """A micro-batch ends by an error; the groups of its backward are forgotten."""
        if self.group_tap is not None:
            self.group_tap.forget()

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reports a gradient, at once, or at the end with others that are small."""
        current = self._current
        assert current is not None
        if id(parameter) in current.reached or parameter in current.gathered:
            raise GradientError(TWICE)
        if gradient.is_cpu and gradient.numel() <= _SMALL and not self._reads_at_once:
            current.gathered[parameter] = gradient
            return
        total = self._sum_of(parameter)
        sums = None if total is None else [total]
        is_first = self.keeps_sums and total is None
        current.report(MicroBatchGradients([parameter], [gradient], sums, is_first))

    # a backward

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._current is not None and not self._subscribers:
            return
        self._begin_backward()
        current = self._current
        if current is None or self.hides or self.failed:
            return
        require_dense([gradient])
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if current.several or self.gathers:
            total = current.gathered.get(parameter)
            current.gathered[parameter] = gradient if total is None else total + gradient
        else:
            self._emit(parameter, gradient)

    def _begin_backward(self) -> None:
        """Opens a micro-batch at the first gradient of a backward, and has its end called."""
        is_open = self._backward is not None and self._backward() is not None
        if is_open and not follows(self._backward_number):
            return
        if self._current is not None and self._current.implicit:
            self._end_failed()
        self._backward_number = current_backward()
        self._watch_backward()
        if self._current is None and not self.explicit:
            self._open_implicitly()

    def _end_failed(self) -> None:
        self._restart()

    def _watch_backward(self) -> None:
        """Queues what autograd keeps alive until the backward ends or fails.

        It runs after what DDP and FSDP2 queue to finish `.grad`. No frame of an error may keep it.
        """
        queue = Variable._execution_engine.queue_callback
        if self._current is not None:
            last: Any = functools.partial(bool)  # does nothing
            self._backward = weakref.ref(last)
        else:
            last = functools.partial(self._backward_ended)
            self._backward = weakref.ref(last, weak_method(self._backward_gone))
            last = functools.partial(queue, last)
        queue(last)

    @hands_errors_over
    def _open_implicitly(self) -> None:
        opened, backward = MicroBatch(self), self._backward
        opened.implicit = True
        try:
            if self.on_leaves and is_nested():
                raise GradientError(_NESTED)
            self._open(opened)
        finally:  # what the backward leaves after an error belongs to no step
            self._current, self._backward = opened, backward

    @_disable_dynamo
    @hands_errors_over
    def _backward_ended(self) -> None:
        current = self._current
        if current is None or not current.implicit:
            self.foreign_backward |= self.guard.changed_by_foreign_backward()
        elif self._has_accumulated(current):
            self._close(current)
        else:
            if are_freed(self.parameters):
                raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
            self.require_no_step_in_backward()
            self._end_autograd_grad()

    def _has_accumulated(self, current: MicroBatch) -> bool:
        """Whether the backward has written to `.grad`, as autograd.grad does not."""
        return self.guard.grad_may_wait or self.guard.stamps_before != self.guard.stamps()

    def _backward_gone(self, backward: object) -> None:
        """A backward has ended, or failed in the micro-batch that it opened."""
        if self._current is not None and self._current.implicit and backward is self._backward:
            # Whether the user's code waits for this; the frame above is that of `weak_method`. A
            # thread of autograd's for a device drops it later; then the next backward abandons it.
            waits = sys._getframe(1).f_back is not None
            (type(self) if waits else GradientSource)._abandon(self)

    def _end_autograd_grad(self) -> None:
        """Refuses what its hooks, if not its gradients, have shown to the subscribers."""
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine freed the memory of a parameter that it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)
