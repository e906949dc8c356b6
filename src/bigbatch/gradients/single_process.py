"""Gradients in one process: each backward's own is read from `.grad`, which starts empty."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.first_hook import HOOKS, FirstHook, is_nested, owners
from bigbatch.gradients.grad_guard import require_dense
from bigbatch.gradients.grad_sums import GradSums, is_tensor
from bigbatch.gradients.gradient_hooks import (
    hands_errors_over,
    remove_hooks,
    watching_hook,
    weak_method,
)
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.source import TWICE, GradientSource
from bigbatch.gradients.tapped_source import MADE_LATE, are_freed

_NEEDS_EXACT = operator.attrgetter("needs_exact_groups")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_NESTED = (
    "a backward inside another one reached the parameters first (reentrant checkpointing of the "
    "whole model, which use_reentrant=False avoids?), so the end of the micro-batch is unknown; "
    "mark the micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch"
)
_LARGE = 1 << 20  # bytes of a gradient that is added at once, to free its memory


class SingleProcessSource(GradientSource):
    """One process: a backward inside a step writes into an empty `.grad`; on several ranks refused.

    See `GradSums` and docs/decisions/0028.

    Args:
        parameters: the parameters to watch.
        explicit: counts only what happens inside `micro_batch`.
        unshared: the error where other ranks exist, with `{ranks}` for their number.
    """

    guard: GradSums

    def __init__(
        self, parameters: Iterable[Tensor], *, explicit: bool = False, unshared: str = ""
    ) -> None:
        begins, ends, gone = self._backward_begins, self._backward_ends, self._backward_gone
        self._first_hook = FirstHook(self, begins, ends, gone)
        self._large: dict[int, RemovableHandle] = {}  # of the gradients that are added at once
        self._numbers: dict[Tensor, int] = {}  # of the watched parameters that need a gradient
        self._lists: dict[tuple[int, ...], list[Tensor]] = {}  # parameters by their numbers
        self._added: set[int] = set()  # parameters whose gradient is in the sums already
        self._attached: tuple[object, ...] | None = None  # what the hooks were put on for
        self._guests: list[SingleProcessSource] = []  # that read the same backward after this one
        self._announced = False  # whether the subscribers know of it
        weakref.finalize(self, remove_hooks, self._large)
        reducer = RankReducer(unshared)
        super().__init__(parameters, GradSums(), reducer, explicit=explicit)

    # hooks

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, between steps."""
        self._attached = None
        super().add(parameters)

    def _attach_hooks(self) -> None:
        """Hooks where a backward begins, and the gradients that are added at once.

        Without subscribers one hook stays on in an explicit source, which shows a foreign backward.
        """
        if self._closed:
            return
        reads = bool(self._subscribers)
        is_exact = reads and any(map(_NEEDS_EXACT, self._subscribers))
        has_groups = self.group_tap is not None
        at_once = has_groups and is_exact  # k gradients of each are in memory
        trains = list(map(_REQUIRES_GRAD, self.parameters))
        needed = trains, reads, has_groups, at_once, self.explicit
        if needed == self._attached:
            return
        self._attached = needed
        self._lists.clear()
        trained = [(i, p) for i, p in enumerate(self.parameters) if p.requires_grad]
        self._numbers = {p: i for i, p in trained} if has_groups else {}
        watched = trained if reads else trained[-1:] if self.explicit else []
        self._first_hook.attach(p for _, p in watched)
        remove_hooks(self._large)
        for number, parameter in trained if reads else ():
            if at_once or parameter.numel() * parameter.element_size() > _LARGE:
                hook = _adding_hook(weak_method(self._add_at_once), number)
                register = parameter.register_post_accumulate_grad_hook
                self._large[number] = register(hook)  # type: ignore[no-untyped-call]

    def _remove_hooks(self) -> None:
        self._attached = None
        self._first_hook.close()
        remove_hooks(self._large)

    def _unhook(self, parameter: Tensor) -> None:
        self._attached = None

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watches these parameters alone, between steps; `zero_grad` still zeroes the others."""
        super().select(parameters)
        self._attach_hooks()

    def local_grads(self) -> list[Tensor]:
        """Every gradient."""
        return self.guard.grads()

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter in the step; None where no micro-batch reached it."""
        places = dict(zip(map(id, self.parameters), itertools.count()))
        return self.guard.sums_of(list(map(places.__getitem__, map(id, parameters))))

    def _watched(self, leaf: Tensor) -> Tensor | None:
        return leaf if leaf in self._numbers else None

    # a micro-batch

    def _open(self) -> None:
        guard, host = self.guard, self._find_host()
        if host is not None:
            host.guard.hide_too(self.parameters)
            guard.host = host.guard
        try:
            changed = self._in_micro_batch or (self.micro_batches > 0 and guard.changed())
            if self.micro_batches and changed and not self.explicit and guard.is_clean():
                self._restart()  # the user called zero_grad(), and starts a new step
            elif self.micro_batches and changed:
                self.require_unchanged("this one")
            self._begin_step()
        except BaseException:
            guard.host = None
            raise
        self._in_micro_batch, self.foreign_backward = True, False
        self._announced = False
        self._added.clear()
        if host is not None:
            host._guests.append(self)
        elif self._subscribers:
            guard.hide()

    def _find_host(self) -> "SingleProcessSource | None":
        """Another source of the same parameters that takes the gradients of this backward apart."""
        if not self._subscribers:
            return None
        if max(map(len, filter(None, map(HOOKS, self.parameters))), default=0) < 2:
            return None
        others = (owner for owner in owners(self.parameters) if owner is not self)
        return next((other for other in others if other.guard.hides), None)

    def _close(self) -> None:
        if not self._subscribers:
            self._in_micro_batch = self._implicit = False
            self.micro_batches += 1
            self.guard.accept()
            return
        try:
            found = self.guard.take()
            self._add_all(found)
        except BaseException:
            self._fail()
            raise
        guests, self._guests = self._guests, []
        by_id = self.guard.by_id(found) if guests else {}
        self.guard.end()
        self._end_micro_batch()
        for guest in guests:
            guest._close_as_guest(by_id)

    def _close_as_guest(self, found: Mapping[int, Tensor | None]) -> None:
        """The micro-batch is complete, and its gradients are in `.grad` already."""
        guard = self.guard
        guard.host = None
        pairs = [(p, found[id(p)]) for p in self.parameters]
        reached = {p: gradient for p, gradient in pairs if gradient is not None}
        self._announce()
        self._report(MicroBatchGradients([*reached], [*reached.values()]))
        guard.accept()
        guard.sums = guard.all_grads()
        self._added = {number for number, p in enumerate(self.parameters) if p in reached}
        self._end_micro_batch()

    def _reached_parameters(self) -> Iterable[Tensor]:
        return [self.parameters[number] for number in self._added]

    def _fail(self) -> None:
        guests, self._guests = self._guests, []
        self.guard.give_back(self._added)
        self.restart()
        for guest in guests:
            guest.guard.host = None
            guest.restart()

    def _announce(self) -> None:
        """Tells the subscribers of the micro-batch, once it is known to have a gradient."""
        if not self._announced:
            self._announced = True
            self._begin_micro_batch()

    def _add_all(self, found: Sequence[Tensor | None]) -> None:
        """Reports what the backward has left, and adds it to the sums."""
        sums, own = self.guard.sums, range(len(self.parameters))
        numbers = tuple(itertools.compress(own, map(is_tensor, found)))
        if not numbers and not self._added:
            self.require_no_step_in_backward()
        self._announce()
        for number in filter(self.guard.left.__contains__, numbers):
            self._report_left(number, found[number])
        if self.guard.left:
            numbers = tuple(number for number in numbers if number not in self.guard.left)
        have_sums = list(map(is_tensor, map(sums.__getitem__, numbers)))
        later = tuple(itertools.compress(numbers, have_sums))
        without = tuple(itertools.compress(numbers, map(operator.not_, have_sums)))
        for some, is_first in ((without, True), (later, False)):
            if some:
                self._add(some, found, first=is_first)
        for number in range(len(own), len(found)):  # of guests
            if (gradient := found[number]) is not None:
                self.guard.add([number], [gradient], summed=False, first=sums[number] is None)

    def _report_left(self, number: int, gradient: Any) -> None:
        """Reports a gradient that is in `.grad` already."""
        before, grad = self.guard.left[number], self.parameters[number].grad
        sums = None if before is None else [before]
        batch = MicroBatchGradients(self._listed((number,)), [gradient], sums, before is None)
        self._report(batch)
        self.guard.sums[number] = None if grad is None else grad.detach()
        self._added.add(number)

    def _add(self, numbers: tuple[int, ...], found: Sequence[Any], *, first: bool) -> None:
        gradients: list[Tensor] = list(map(found.__getitem__, numbers))
        sums = None if first else self.guard.sums_before(numbers)
        may_sum = not first and not self._guests and not self.guard.has_graphs
        batch = MicroBatchGradients(self._listed(numbers), gradients, sums, first, may_sum)
        self._report(batch)
        self.guard.add(numbers, gradients, summed=batch.summed, first=first)
        self._added.update(numbers)

    def _listed(self, numbers: tuple[int, ...]) -> list[Tensor]:
        """The parameters with these numbers, as the same list each time."""
        if numbers not in self._lists:
            self._lists[numbers] = [self.parameters[number] for number in numbers]
        return self._lists[numbers]

    def _add_at_once(self, number: int, parameter: Tensor) -> None:
        """Adds a gradient as soon as it is there; a backward that two reach is refused."""
        gradient = parameter.grad
        hooks = parameter._post_accumulate_grad_hooks or ()
        waits = self._several or self._guests or len(hooks) > 1
        if not self._in_micro_batch or waits or self.guard.host is not None or gradient is None:
            return
        if gradient.requires_grad:  # of create_graph=True, which `.grad` keeps
            return
        if number in self._added:
            raise GradientError(TWICE)
        require_dense([gradient])
        self._announce()
        found: list[Tensor | None] = [None] * (number + 1)
        found[number] = gradient
        self._add((number,), found, first=self.guard.sums[number] is None)
        parameter.grad = None

    # a backward

    def _backward_begins(self) -> bool:
        """The first gradient of a backward is about to come; whether its end matters."""
        if self._implicit:
            self._restart()  # the previous backward failed
        if self._in_micro_batch or self.failed:
            return False
        if not self.explicit:
            self._begin_implicit()
        return self.explicit or self._implicit

    @hands_errors_over
    def _begin_implicit(self) -> None:
        if is_nested():
            raise GradientError(_NESTED)
        self._weight, self._several = 1.0, False
        self._open()
        self._implicit = True

    @_disable_dynamo
    @hands_errors_over
    def _backward_ends(self) -> None:
        if self.guard.host is not None:
            return  # which hands the gradients over
        if not self._implicit:
            self.foreign_backward |= self.guard.changed()
        elif self._added or self.guard.found():
            self._close()
        else:  # autograd.grad, which accumulates nothing
            self.require_no_step_in_backward()
            if are_freed(self.parameters):
                self._fail()
                raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
            self.guard.show()
            for source in (self, *self._guests):
                source.guard.host = None
                source._in_micro_batch = source._implicit = False
            self._guests.clear()

    def _backward_gone(self) -> None:
        """A backward has ended, or failed in the micro-batch that it opened."""
        if self._implicit and self.guard.host is None:
            self._forget_groups()
            self.guard.give_back(self._added)


def _adding_hook(add: Callable[[int, Tensor], None], number: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        add(number, parameter)

    return watching_hook(hook)
