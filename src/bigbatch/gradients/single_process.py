"""Gradients in one process: each backward's own is read from `.grad`, which starts empty."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.first_hook import HOOKS, FirstHook, is_nested
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

_POST_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_NEEDS_EXACT = operator.attrgetter("needs_exact_groups")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_NESTED = (
    "a backward inside another one reached the parameters first (reentrant checkpointing of the "
    "whole model, which use_reentrant=False avoids?), so the end of the micro-batch is unknown; "
    "mark the micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch"
)
_HOOKED = "a hook was put on a parameter, or a meter made, within a step; do that between two steps"
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
        self._first_hook = FirstHook(begins, ends, gone, self._backward_over)
        self._large: dict[int, RemovableHandle] = {}  # of the gradients that are added at once
        self._numbers: dict[Tensor, int] = {}  # of the watched parameters that need a gradient
        self._lists: dict[tuple[int, ...], list[Tensor]] = {}  # parameters by their numbers
        self._added: set[int] = set()  # parameters whose gradient is in the sums already
        self._attached: tuple[object, ...] | None = None  # what the hooks were put on for
        # Where anybody else has a hook on a parameter, autograd accumulates by itself, and a tap on
        # each sees its gradient: numbers of the parameters, and what the taps have caught
        self._taps: dict[int, RemovableHandle] = {}
        self._caught: dict[int, Tensor] = {}
        self._announced = False  # whether the subscribers know of it
        weakref.finalize(self, remove_hooks, self._large)
        weakref.finalize(self, remove_hooks, self._taps)
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
        others = self._hooks_of_others() if reads else []
        needed = trains, reads, has_groups, at_once, self.explicit, others
        if needed == self._attached:
            return
        self._attached = needed
        self._lists.clear()
        trained = [(i, p) for i, p in enumerate(self.parameters) if p.requires_grad]
        self._numbers = {p: i for i, p in trained} if has_groups else {}
        watched = trained if reads else trained[-1:] if self.explicit else []
        self._first_hook.attach(p for _, p in watched)
        remove_hooks(self._large)
        remove_hooks(self._taps)  # to come after the others again
        for number, parameter in trained if reads else ():
            is_large = at_once or parameter.numel() * parameter.element_size() > _LARGE
            if others:
                tap = _hook(weak_method(self._catch), number, is_large)
                self._taps[number] = parameter.register_hook(tap)  # type: ignore[no-untyped-call]
            elif is_large:
                hook = _hook(weak_method(self._add_at_once), number)
                register = parameter.register_post_accumulate_grad_hook
                self._large[number] = register(hook)  # type: ignore[no-untyped-call]

    def _hooks_of_others(self) -> list[int]:
        """Ids of all hooks on gradients and sums of the parameters that are not this source's."""
        kinds = list(map(HOOKS, self.parameters)), list(map(_POST_HOOKS, self.parameters))
        own = len(self._first_hook) + len(self._taps), len(self._large)
        if [sum(map(len, filter(None, hooks))) for hooks in kinds] == [*own]:
            return []
        handles = (*self._first_hook.handles(), *self._taps.values(), *self._large.values())
        ours = {handle.id for handle in handles}
        present = itertools.chain.from_iterable(filter(None, itertools.chain(*kinds)))
        return [number for number in present if number not in ours]

    def _remove_hooks(self) -> None:
        self._attached = None
        self._first_hook.close()
        remove_hooks(self._large)
        remove_hooks(self._taps)

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
        guard = self.guard
        changed = self._in_micro_batch or (self.micro_batches > 0 and guard.changed())
        if self.micro_batches and changed and not self.explicit and guard.is_clean():
            self._restart()  # the user called zero_grad(), and starts a new step
        elif self.micro_batches and changed:
            self.require_unchanged("this one")
        is_tapped = not self._subscribers or self._taps
        if self.micro_batches and not is_tapped and self._hooks_of_others():
            raise GradientError(_HOOKED)
        self._begin_step()
        self._in_micro_batch, self.foreign_backward = True, False
        self._announced = False
        self._added.clear()
        self._caught.clear()
        if self._subscribers and not self._taps:
            guard.hide()

    def _close(self) -> None:
        if not self._subscribers:
            self._in_micro_batch = self._implicit = False
            self.micro_batches += 1
            self.guard.accept()
            return
        try:
            if self._taps:
                self._report_caught()
            else:
                self._add_all(self.guard.take())
        except BaseException:
            self._fail()
            raise
        if self._taps:
            self.guard.end_accumulated()
        else:
            self.guard.end()
        self._end_micro_batch()

    def _reached_parameters(self) -> Iterable[Tensor]:
        return [self.parameters[number] for number in self._added]

    def _fail(self) -> None:
        self.guard.give_back(self._added)
        self._caught.clear()
        self.restart()

    def _announce(self) -> None:
        """Tells the subscribers of the micro-batch, once it is known to have a gradient."""
        if not self._announced:
            self._announced = True
            self._begin_micro_batch()

    def _add_all(self, found: Sequence[Tensor | None]) -> None:
        """Reports what the backward has left, and adds it to the sums."""
        sums = self.guard.sums
        numbers = tuple(itertools.compress(range(len(found)), map(is_tensor, found)))
        if not numbers and not self._added:
            self.require_no_step_in_backward()
        self._announce()
        have_sums = list(map(is_tensor, map(sums.__getitem__, numbers)))
        later = tuple(itertools.compress(numbers, have_sums))
        without = tuple(itertools.compress(numbers, map(operator.not_, have_sums)))
        for some, is_first in ((without, True), (later, False)):
            if some:
                self._add(some, found, first=is_first)

    def _report_caught(self) -> None:
        """Reports what the taps have caught, of a backward that accumulates by itself."""
        grads, written = self.guard.all_grads(), set(self.guard.added_to())
        caught, self._caught = self._caught, {}
        if any(grads[number] is None for number in (*caught, *self._added)):
            self.require_no_step_in_backward()
        for number in written - caught.keys() - self._added:
            # the tap was put on in this backward, the step's first
            grad = grads[number]
            if self.micro_batches or grad is None:
                raise GradientError(_HOOKED)
            caught[number] = grad.detach().clone()
        self._announce()
        if caught:
            require_dense(caught.values())
            numbers = tuple(sorted(caught))
            gradients = [caught[number] for number in numbers]
            self._report(MicroBatchGradients(self._listed(numbers), gradients))
            self._added.update(numbers)

    def _catch(self, number: int, at_once: bool, gradient: Tensor) -> None:
        """A tap has seen a gradient, which autograd adds to `.grad`."""
        if not self._in_micro_batch:
            return
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if at_once and not self._several:
            if number in self._added:
                raise GradientError(TWICE)
            require_dense([gradient])
            self._announce()
            self._report(MicroBatchGradients(self._listed((number,)), [gradient]))
            self._added.add(number)
        elif number in self._caught:
            self._caught[number] = self._caught[number] + gradient
        else:
            self._caught[number] = gradient  # held, so autograd does not write to its memory

    def _add(self, numbers: tuple[int, ...], found: Sequence[Any], *, first: bool) -> None:
        gradients: list[Tensor] = list(map(found.__getitem__, numbers))
        sums = None if first else self.guard.sums_before(numbers)
        may_sum = not first and not self.guard.has_graphs
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
        if not self._in_micro_batch or self._several or gradient is None:
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
        return True

    @hands_errors_over
    def _begin_implicit(self) -> None:
        self._weight, self._several = 1.0, False
        try:
            if is_nested():
                raise GradientError(_NESTED)
            self._open()
        except GradientError:
            self._in_micro_batch = True  # what the backward leaves belongs to no step
            raise
        finally:
            self._implicit = True

    @_disable_dynamo
    @hands_errors_over
    def _backward_ends(self) -> None:
        if not self._implicit:
            self.foreign_backward |= self.guard.changed()
        elif self._added or (self.guard.added_to() if self._taps else self.guard.found()):
            self._close()
        else:  # autograd.grad, which accumulates nothing
            self.require_no_step_in_backward()
            if are_freed(self.parameters):
                self._fail()
                raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
            self.guard.show()
            self._caught.clear()
            self._in_micro_batch = self._implicit = False

    def _require_over(self) -> None:
        self._first_hook.require_over()

    def _backward_gone(self) -> None:
        """A backward has ended, or failed in the micro-batch that it opened."""
        if self._implicit:
            self._forget_groups()

    def _backward_over(self, late: bool) -> None:
        """The same, in the thread of the user's code.

        What the first hook of a backward saw is in `.grad`, unless the user has zeroed it since.
        """
        if self._implicit and (not late or self._added or self.guard.found()):
            self.guard.give_back(self._added)


def _hook(function: Callable[..., None], *leading: Any) -> Callable[..., None]:
    def hook(argument: Tensor) -> None:
        function(*leading, argument)

    return watching_hook(hook)
