"""A model's micro-batch gradients: seen by a tap, guarded in `.grad`, reduced over ranks."""

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.gradient_hooks import hands_errors_over, weak_method
from bigbatch.gradients.groups.group_norms import GroupNorms
from bigbatch.gradients.groups.group_tap import GroupTap, refusal_message
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.protocols import Subscriber
from bigbatch.gradients.rank_reducer import RankReducer

MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)


class GradientSource:
    """Reports each micro-batch's gradient to its subscribers, and checks `.grad` meanwhile.

    By default every `backward()` is one micro-batch. With `explicit=True` only a backward inside
    `with source.micro_batch(weight)` counts.

    An engine is supported by three parts: the tap knows where to hook gradients, the guard what
    this rank has of `.grad`, the reducer the ranks. `gradients/ddp.py` is an example.

    Args:
        parameters: the parameters to watch.
        tap: hooks the gradients.
        guard: reads `.grad` on this rank, and notices who else writes to it.
        reducer: communicates, and knows which shard of the mean gradient each rank has.
        explicit: counts only what happens inside `micro_batch`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        tap: GradientTap,
        guard: GradGuard,
        reducer: RankReducer,
        *,
        explicit: bool = False,
    ) -> None:
        self.explicit = explicit
        self.guard, self.reducer = guard, reducer
        self.on_error: Callable[[Exception], None] | None = None  # see `hands_errors_over`
        self.failed = False
        self.rank, self.ranks = reducer.rank, reducer.ranks
        self.parameters: list[Tensor] = guard.parameters
        self.micro_batches = 0  # complete micro-batches of the step on this rank
        self.foreign_backward = False  # an uncounted backward wrote to .grad since the last one
        self._tap = tap
        self._unwatched: dict[Tensor, None] = {}  # parameters that are only zeroed
        self._selection: list[Tensor] = []  # the argument of the last `select`
        self._subscribers: list[Subscriber] = []
        self._step_begun = False
        self._in_micro_batch = False
        self._implicit = False  # whether a backward opened the micro-batch, not micro_batch()
        self._reached: set[Tensor] = set()  # parameters that the current micro-batch reached
        self._end_callback: weakref.ref[Callable[[], None]] | None = None  # alive in a backward
        self._closed = False
        self.group_tap: GroupTap | None = None  # if a backward is cut into groups
        # of the groups of each micro-batch of the step; None if it has none
        self.group_norms: list[GroupNorms | None] = []
        self._report = weak_method(self._on_gradient)
        self.add(parameters)

    # what is watched, and who reads it

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, between steps."""
        watched = set(self.parameters)
        for parameter in parameters:
            self._tap.require_supported(parameter)
            if parameter not in watched:
                watched.add(parameter)
                self.parameters.append(parameter)
                self._unwatched.pop(parameter, None)
        self._attach_hooks()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these parameters alone, between steps; `zero_grad` still zeroes the others."""
        selection, previous = list(parameters), self._selection
        unchanged = len(selection) == len(previous) and all(map(operator.is_, selection, previous))
        if unchanged and len(selection) == len(self.parameters):
            self._attach_hooks()  # one may have been unfrozen
            return
        self._selection, selected = selection, dict.fromkeys(selection)
        self.add([p for p in self._unwatched if p in selected])  # in the order of the model
        self.add(selected)
        for parameter in [p for p in self.parameters if p not in selected]:
            self._unwatched[parameter] = None
            self._tap.detach(parameter)
            self.guard.forget(parameter)
        self.parameters[:] = [p for p in self.parameters if p in selected]

    def cut_backwards(
        self, groups: int, layers: Mapping[Tensor, int], model: nn.Module | None = None
    ) -> None:
        """Also reports the gradients of so many groups of samples in each prepared backward.

        Raises:
            SettingError: the gradients are those of all ranks together, and have no groups.
        """
        if self.reducer.reduces_each_backward:
            raise SettingError(
                "groups= needs each rank's own gradient, and this engine reduces in every "
                "backward; measure by micro-batches, groups=None"
            )
        watched, checks_samples = weak_method(self._watched), self._tap.on_leaves
        self.group_tap = GroupTap(groups, watched, layers, model, checks_samples=checks_samples)

    def _watched(self, leaf: Tensor) -> Tensor | None:
        """The watched parameter of a leaf of the graph; None if it is another's."""
        parameter = self._tap.parameter_of(leaf)
        return parameter if self._tap.is_hooked(parameter) else None

    def prepare_groups(
        self,
        roots: Iterable[Tensor],
        samples: int,
        sample_weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        """The backward of `roots` is next; see `GroupTap.prepare`."""
        if self.group_tap is not None and self._subscribers:
            self.group_tap.exact = any(s.needs_exact_groups for s in self._subscribers)
            self.group_tap.prepare(roots, samples, sample_weights)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Reports every later step to `subscriber`; call it between steps."""
        self._subscribers.append(subscriber)
        self._attach_hooks()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stops reporting to `subscriber`; without subscribers no hook stays on."""
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._remove_hooks()
            self._attach_hooks()

    def close(self) -> None:
        """Removes every hook for good."""
        self._closed = True
        self._forget_groups()
        self._remove_hooks()

    def _attach_hooks(self) -> None:
        """Hooks every parameter that requires a gradient.

        Without subscribers one leaf hook stays on, which shows a backward outside `micro_batch`.
        """
        if self._closed:
            return
        if self._subscribers:
            self._tap.attach(self.parameters, self._report)
        elif self.explicit and self._tap.on_leaves:
            trained = (p for p in reversed(self.parameters) if p.requires_grad)
            self._tap.attach(itertools.islice(trained, 1), self._report)

    def _remove_hooks(self) -> None:
        self._tap.close()
        self.guard.close()

    # the step

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        self._forget_groups()
        self._restart()

    def _forget_groups(self) -> None:
        """Forgets the backward that is prepared, whose graph it holds."""
        if self.group_tap is not None:
            self.group_tap.forget()

    def _restart(self) -> None:
        """The same in a backward, which keeps what it prepared."""
        self.micro_batches = 0
        self.group_norms = []
        self._step_begun = self.foreign_backward = False
        self._in_micro_batch = self._implicit = self.failed = False
        self._end_callback = None
        self.guard.restart()
        self._attach_hooks()

    def zero_grad(self) -> None:
        """Sets every gradient to None and forgets the step."""
        for parameter in (*self.parameters, *self._unwatched):
            parameter.grad = None
        self.restart()

    @contextmanager
    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> Iterator[None]:
        """Counts what is computed inside as one micro-batch.

        Args:
            weight: n_d.
            several_backwards: allows any number of backwards, for one copy of the gradient.
        """
        if self._in_micro_batch and not self._implicit:
            raise GradientError("micro_batch() was entered inside another; leave the first before")
        self._open(weight)
        try:
            if several_backwards:
                self.guard.start_total()
            yield
            if several_backwards:
                self._emit_total()
        except BaseException:
            self.guard.restore_hidden()
            self.restart()
            raise
        self._close(self.guard.stamps())

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Runs a backward of zeros, which only keeps this rank in step with the other ranks."""
        self._begin_step()  # in which this rank may have no micro-batch
        yield
        self.foreign_backward = False
        self.guard.accept()

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        self.guard.scale(factor)
        self.reducer.shards.after_scale(factor)

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of the reduced gradient, at the end of a step.

        It is that of `.grad`, unless an optimizer has replaced that.
        """
        return self.reducer.shards.local_grad(parameter, self.guard.local_grad(parameter))

    def require_unchanged(self, caller: str) -> None:
        """Raises GradientError where no step is measured, or `.grad` was written to since."""
        if self._in_micro_batch:
            self.restart()
            raise GradientError(
                "the last backward did not finish, so its gradient is incomplete; "
                "zero the gradients and repeat the step"
            )
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
        if self._step_begun:
            return
        self._attach_hooks()
        self.reducer.require_shared()
        self.guard.begin(foreign_backward=self.foreign_backward)
        self._step_begun = True
        for subscriber in self._subscribers:
            subscriber.begin()

    # a micro-batch

    def _open(self, weight: float) -> None:
        changed = self.guard.open_micro_batch() or self._in_micro_batch
        may_be_zeroed = self.micro_batches and changed and not self.explicit
        if may_be_zeroed and self.guard.is_clean_within_step():
            self._restart()  # the user called zero_grad(), and starts a new step
        if self.micro_batches and changed and not self.guard.engine_writes:
            self.require_unchanged("this one")
        if self.micro_batches and self.explicit and self.guard.engine_writes:
            self._require_undisturbed()
        self._begin_step()
        self._reached.clear()
        self._in_micro_batch, self.foreign_backward = True, False
        tap = self.group_tap
        groups = 1 if tap is None or tap.grouping is None else len(tap.weights)
        for subscriber in self._subscribers:
            subscriber.micro_batch(weight, groups)

    def _require_undisturbed(self) -> None:
        """Checks gradients that an engine writes to, without waiting for the device."""
        if self.foreign_backward or self.guard.all_set_to_none():
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        self._reached.add(parameter)
        for subscriber in self._subscribers:
            subscriber.gradient(parameter, gradient)
        if self.group_tap is None or self.group_tap.grouping is None:
            return
        groups = self.group_tap.take(parameter, gradient)
        if groups is not None and len(groups.weights) > 1:  # one group is the gradient itself
            for subscriber in self._subscribers:
                subscriber.groups(parameter, gradient, groups)

    @torch.no_grad()
    def _emit_total(self) -> None:
        for parameter, total in self.guard.end_total():
            self._emit(parameter, total)

    def _close(self, stamps: list[Stamp]) -> None:
        if self.guard.restore_hidden():
            self._refuse_autograd_grad()
        if not any(stamps) and not self.guard.grad_may_wait:
            self.require_no_step_in_backward()
        self._in_micro_batch = self._implicit = False
        self.micro_batches += 1
        self.guard.accept(stamps)
        if self._subscribers:
            self._require_seen(self.guard.written_parameters(stamps))
        self.group_norms.append(None)
        if self.group_tap is not None and self.group_tap.grouping is not None:
            self._close_groups(self.group_tap)
        for subscriber in self._subscribers:
            subscriber.end()

    def _close_groups(self, tap: GroupTap) -> None:
        """Every parameter that the backward reached must have had its groups."""
        unseen = {p: reason for p, reason in tap.refusals.items() if p in self._reached}
        self.group_norms[-1] = tap.end()
        if unseen:
            gradients = {p: self.guard.local_grad(p) for p in self._reached}
            self.refuse_groups(refusal_message(unseen, gradients, tap.model))

    def refuse_groups(self, reason: str) -> None:
        """Raises GradientError if there is a reason why the groups of the step cannot be used."""
        if reason:
            self.restart()
            raise GradientError(f"{reason}; measure by micro-batches instead, groups=None")

    def _require_seen(self, written_parameters: list[Tensor]) -> None:
        """An engine may write to the gradient of a parameter that this rank did not reach."""
        engine_writes = self.guard.engine_writes
        is_seen = self._tap.is_hooked if engine_writes else self._reached.__contains__
        if not all(map(is_seen, written_parameters)):
            self.restart()
            raise GradientError(
                "a parameter received a gradient that was not seen: it was unfrozen, or its "
                "hooks were removed, after the step began; do that between steps"
            )

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

    def _refuse_autograd_grad(self) -> None:
        self.restart()
        if are_freed(self.parameters):
            raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
        self.require_no_step_in_backward()
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )

    # a backward

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """A hook reports the gradient of one parameter."""
        if self._in_micro_batch and not self._subscribers:
            return
        backward_begins = self._end_callback is None or self._end_callback() is None
        if backward_begins and self._implicit:
            self._restart()  # the previous backward failed
        if backward_begins and not self._in_micro_batch:
            if not self.explicit:
                self._open(1.0)
                self._implicit = True
            self._call_when_backward_ends()
        if not self._in_micro_batch:
            return
        if gradient.layout != torch.strided or gradient.is_complex():
            raise GradientError(
                f"a {gradient.dtype} gradient of layout {gradient.layout} cannot be measured; use "
                "dense real gradients, for embeddings sparse=False"
            )
        if gradient.requires_grad:
            gradient = gradient.detach()
        if not self.guard.add_to_total(parameter, gradient):
            self._emit(parameter, self.guard.added_by(parameter, gradient))
            self.guard.after_report(parameter, gradient)

    def _call_when_backward_ends(self) -> None:
        """Queues a callback that the autograd engine keeps alive until the backward ends or fails.

        It queues another, which runs after those that DDP and FSDP2 queued to finish `.grad`.
        """
        ended = self._backward_ended if self._implicit else self._foreign_backward_ended
        last = functools.partial(ended)  # an object of this backward alone
        self._end_callback = weakref.ref(last, weak_method(self._backward_gone))
        queue = Variable._execution_engine.queue_callback
        queue(functools.partial(queue, last))

    @_disable_dynamo
    @hands_errors_over
    def _backward_ended(self) -> None:
        stamps = self.guard.stamps()
        if self.guard.stamps_before == stamps and not self.guard.grad_may_wait:
            self._refuse_autograd_grad()
        self._close(stamps)

    def _backward_gone(self, _: object) -> None:
        """A backward has ended, or failed in the micro-batch that it opened."""
        if self._implicit:
            self._forget_groups()

    @_disable_dynamo
    @hands_errors_over
    def _foreign_backward_ended(self) -> None:
        self.foreign_backward |= self.guard.changed_by_foreign_backward()


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine freed the memory of a parameter that it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)
