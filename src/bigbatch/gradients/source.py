"""A model's micro-batch gradients, reported to subscribers; `.grad` is checked meanwhile."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.gradient_hooks import current_backward, weak_method
from bigbatch.gradients.groups.group_norms import GroupNorms
from bigbatch.gradients.groups.group_tap import GroupTap, refusal_message
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.protocols import MicroBatchGradients, Subscriber
from bigbatch.gradients.rank_reducer import RankReducer

TWICE = (
    "a parameter received two gradients in one micro-batch (reentrant checkpointing, which "
    "use_reentrant=False avoids?); mark the micro-batches with `with meter.micro_batch():`"
)


class _Scope:
    """What happens inside is one micro-batch of a source."""

    def __init__(self, source: "GradientSource") -> None:
        self._source = source

    def __enter__(self) -> None:
        if self._source._implicit:
            self._source._end_failed()
        self._source._open()

    def __exit__(self, kind: object, *_: object) -> None:
        is_complete = False
        try:
            if kind is None:
                self._source._close()
                is_complete = True
        finally:
            if not is_complete:
                self._source._abandon()
                self._source._restart()


class GradientSource(ABC):
    """Reports each micro-batch's gradient to its subscribers, and checks `.grad` meanwhile.

    By default every `backward()` is one micro-batch. With `explicit=True` only a backward inside
    `with source.micro_batch(weight)` counts.

    What a micro-batch is, `TappedSource` knows.

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
        self.guard, self.reducer, self._tap = guard, reducer, tap
        self.on_error: Callable[[Exception], None] | None = None  # see `hands_errors_over`
        self.failed = False
        self.rank, self.ranks = reducer.rank, reducer.ranks
        self.parameters: list[Tensor] = guard.parameters
        self.micro_batches = 0  # complete micro-batches of the step on this rank
        self.foreign_backward = False  # an uncounted backward wrote to .grad since the last one
        self._unwatched: dict[Tensor, None] = {}  # parameters that are only zeroed
        self._subscribers: list[Subscriber] = []
        self._step_begun = False
        self._in_micro_batch = False
        self._implicit = False  # whether a backward opened the micro-batch, not micro_batch()
        self._several = False  # whether the micro-batch may have several backwards
        self._announced = False  # whether the subscribers know of it
        self._reached: dict[int, Tensor] = {}  # parameters that it has reached, by their ids
        self._gathered: dict[Tensor, Tensor] = {}  # gradients that are not reported yet
        self._elements = 0  # of small ones among these
        self._hides = False  # whether it reads gradients from `.grad`, which starts empty
        self._reads_at_once = False  # whether a subscriber wants each as it comes
        self._backward: weakref.ref[Any] | None = None  # to an object that lives as long as it
        self._backward_number = -1  # torch's
        self._closed = False
        self.group_tap: GroupTap | None = None  # if a backward is cut into groups
        # of the groups of each micro-batch of the step; None if it has none
        self.group_norms: list[GroupNorms | None] = []
        self._weight = 1.0  # of the current micro-batch
        self.add(parameters)

    # by kind of source

    @abstractmethod
    def _attach_hooks(self) -> None:
        """Hooks the parameters as far as the subscribers need it."""

    @abstractmethod
    def _open(self) -> None:
        """A micro-batch starts."""

    @abstractmethod
    def _close(self) -> None:
        """The micro-batch is complete."""

    def _abandon(self) -> None:
        """A micro-batch ends by an error; the groups of its backward are forgotten."""
        if self.group_tap is not None:
            self.group_tap.forget()

    def _end_failed(self) -> None:
        """Another micro-batch begins after a backward that has failed."""
        self._restart()

    def _watched(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The watched parameters of leaves of the graph; None for one of another's."""
        parameters = map(self._tap.parameter_of, leaves)
        return [p if self._tap.is_hooked(p) else None for p in parameters]

    # what is watched, and who reads it

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, between steps."""
        watched = set(self.parameters)
        for parameter in parameters:
            if parameter.is_complex() and parameter.requires_grad:
                raise SettingError(
                    "a complex parameter cannot be measured; hold torch.view_as_real of it"
                )
            self._tap.require_supported(parameter)
            if parameter not in watched:
                watched.add(parameter)
                self.parameters.append(parameter)
                self._unwatched.pop(parameter, None)
        self._attach_hooks()

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these parameters alone, between steps; `zero_grad` still zeroes the others."""
        selected = dict.fromkeys(parameters)
        self.add([p for p in self._unwatched if p in selected])  # in the order of the model
        self.add(selected)
        for parameter in [p for p in self.parameters if p not in selected]:
            self._unwatched[parameter] = None
            self._tap.detach(parameter)
        self.parameters[:] = [p for p in self.parameters if p in selected]
        self._attach_hooks()

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
        watched = weak_method(self._watched)
        self.group_tap = GroupTap(
            groups, watched, layers, model, checks_samples=self._tap.on_leaves
        )
        self._attach_hooks()

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
            self._remove_hooks()
            self._attach_hooks()

    def close(self) -> None:
        """Removes every hook for good."""
        self._closed = True
        if self.group_tap is not None:
            self.group_tap.forget()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._tap.close()

    # the step

    def restart(self) -> None:
        """Forgets the step: the next micro-batch is the first of a new one."""
        if self.group_tap is not None:
            self.group_tap.forget()
        self._restart()

    def _restart(self) -> None:
        """The same in a backward, which keeps what it prepared."""
        self.micro_batches, self._backward = 0, None
        self.group_norms, self._gathered = [], {}
        self._step_begun = self.foreign_backward = False
        self._in_micro_batch = self._implicit = self.failed = False
        self.guard.restart()
        if self._subscribers:
            self._attach_hooks()

    def zero_grad(self) -> None:
        """Sets every gradient to None and forgets the step."""
        for parameter in (*self.parameters, *self._unwatched):
            parameter.grad = None
        self.restart()

    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> AbstractContextManager[None]:
        """Counts what is computed inside as one micro-batch.

        Args:
            weight: n_d.
            several_backwards: allows any number of backwards.
        """
        if self._in_micro_batch and not self._implicit:
            raise GradientError("micro_batch() was entered inside another; leave the first before")
        self._weight, self._several = weight, several_backwards
        return _Scope(self)

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

    def local_grads(self) -> list[Tensor]:
        """`local_grad` of every parameter that has one."""
        grads = map(self.local_grad, self.parameters)
        return [grad for grad in grads if grad is not None]

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter; None where no micro-batch reached it, or S is not kept."""
        return self.guard.sums_of(parameters)

    def require_finished(self) -> None:
        """Raises GradientError where the last backward has failed, and nothing was zeroed since."""
        if self._in_micro_batch:
            self.restart()
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
        if self._step_begun:
            return
        self._attach_hooks()
        self.reducer.require_shared()
        self.guard.begin(foreign_backward=self.foreign_backward)
        self._step_begun = True
        for subscriber in self._subscribers:
            subscriber.begin()

    def _announce(self) -> None:
        """Announces the micro-batch to the subscribers, once it is known to be one."""
        if self._announced:
            return
        self._announced = True
        tap = self.group_tap
        groups = 1 if tap is None or tap.grouping is None else len(tap.weights)
        for subscriber in self._subscribers:
            subscriber.micro_batch(self._weight, groups)

    def _report(self, batch: MicroBatchGradients) -> None:
        """Hands gradients of the micro-batch to the subscribers, and what its groups add."""
        self._announce()
        self._reached.update(zip(map(id, batch.parameters), batch.parameters, strict=True))
        for subscriber in self._subscribers:
            subscriber.gradients(batch)
        if self.group_tap is None or self.group_tap.grouping is None:
            return
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            groups = self.group_tap.take(parameter, gradient)
            if groups is not None and len(groups.weights) > 1:  # one group is the gradient itself
                for subscriber in self._subscribers:
                    subscriber.groups(parameter, gradient, groups)

    def _end_micro_batch(self) -> None:
        """Counts a complete micro-batch."""
        self._announce()
        self._in_micro_batch = self._implicit = False
        self.micro_batches += 1
        self.group_norms.append(None)
        if self.group_tap is not None and self.group_tap.grouping is not None:
            self._end_groups(self.group_tap)
        for subscriber in self._subscribers:
            subscriber.end()

    def _end_groups(self, tap: GroupTap) -> None:
        """Every parameter that the backward reached must have had its groups."""
        unseen = {p: reason for p, reason in tap.refusals.items() if id(p) in self._reached}
        self.group_norms[-1] = tap.end()
        if unseen:
            self.refuse_groups(refusal_message(unseen, tap.model))

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
