"""Gradients in one process: each backward's own is read from `.grad`, which starts empty."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.grad_guard import is_tensor, require_dense
from bigbatch.gradients.grad_sums import GradSums
from bigbatch.gradients.gradient_hooks import (
    first_hook,
    raise_after_backward,
    remove_hooks,
    watching_hook,
    weak_method,
)
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.source import TWICE, GradientSource, MicroBatch

_HOOKS = operator.attrgetter("_backward_hooks")
_POST_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")
_NEEDS_EXACT = operator.attrgetter("needs_exact_groups")
_HOOKED = "a hook was put on a parameter, or a meter made, within a step; do that between two steps"
_MOST_LISTS = 64  # of parameters that micro-batches reached
_LARGE = 1 << 20  # bytes of a gradient that is added at once, to free its memory


class SingleProcessSource(GradientSource):
    """One process: a backward inside a step writes into an empty `.grad`; on several ranks refused.

    See `GradSums` and docs/decisions/0028. Where anybody else has a hook on a parameter, autograd
    accumulates by itself, and a tap on each parameter sees its gradient.

    Args:
        parameters: the parameters to watch.
        explicit: counts only what happens inside `micro_batch`.
        unshared: the error where other ranks exist, with `{ranks}` for their number.
    """

    guard: GradSums
    gathers = True
    float32_refusal = ""

    def __init__(
        self, parameters: Iterable[Tensor], *, explicit: bool = False, unshared: str = ""
    ) -> None:
        self._attached: tuple[object, ...] | None = None  # what the hooks were put on for
        self._numbers: dict[int, int] = {}  # of the parameters, by their ids
        self._lists: dict[tuple[int, ...], list[Tensor]] = {}  # parameters by their numbers
        self.explicit = explicit
        super().__init__(parameters, GradSums(), RankReducer(unshared))

    # hooks

    def _attach_hooks(self) -> None:
        """Hooks where a backward begins, and the gradients that are added at once."""
        if self._closed:
            return
        reads, trained = bool(self._subscribers), [p for p in self.parameters if p.requires_grad]
        if not reads:
            trained = trained[-1:] if self.explicit else []
        others = self._hooks_of_others() if reads else []
        # of exact groups k gradients of each parameter are in memory
        at_once = self.group_tap is not None and any(map(_NEEDS_EXACT, self._subscribers))
        needed = reads, at_once, others, list(map(id, self.parameters)), list(map(id, trained))
        if needed == self._attached:
            return
        remove_hooks(self._handles)
        self._attached, self.hides = needed, reads and not others
        self._lists.clear()
        self._numbers = dict(zip(map(id, self.parameters), itertools.count(), strict=False))
        begins = first_hook(self._begin_hooked_backward)
        adds = watching_hook(weak_method(self._add_at_once))
        handles: list[RemovableHandle] = []
        for parameter in trained:
            if others:  # after which the taps come
                handles.append(self._register(parameter, parameter))
                continue
            handles.append(parameter.register_hook(begins))  # type: ignore[no-untyped-call]
            if reads and (at_once or parameter.numel() * parameter.element_size() > _LARGE):
                handles.append(parameter.register_post_accumulate_grad_hook(adds))  # type: ignore[no-untyped-call]
        self._handles.update((handle.id, handle) for handle in handles)

    def _hooks_of_others(self) -> list[int]:
        """Ids of all hooks on gradients and sums of the parameters that are not this source's."""
        kinds = itertools.chain(map(_HOOKS, self.parameters), map(_POST_HOOKS, self.parameters))
        present = itertools.chain.from_iterable(filter(None, kinds))
        return list(itertools.filterfalse(self._handles.__contains__, present))

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter; None where no micro-batch reached it."""
        return self.guard.sums_of(parameters)

    # a micro-batch

    def _open(self, opened: MicroBatch) -> None:
        if self._subscribers or self.micro_batches:
            super()._open(opened)
        else:
            if not self._step_begun:
                self._begin_step()
            self._current, self.foreign_backward = opened, False
        if self.hides:
            self.guard.hide()
        else:
            self.guard.keeps_apart = False

    def _require_undisturbed(self, *, changed: bool) -> None:
        if changed:
            self.require_unchanged("this one")
        if self.hides and self._hooks_of_others():
            raise GradientError(_HOOKED)

    def _close(self, current: MicroBatch) -> None:
        if self.hides:
            self._add_all(current, self.guard.take())
            self.guard.show()
            self.guard.accept()
            self._end_micro_batch(current)
        elif self._subscribers:
            super()._close(current)
        else:
            self._current = None
            self.micro_batches += 1
            self.guard.accept()

    def _require_seen(self, current: MicroBatch, written_parameters: list[Tensor]) -> None:
        """Takes the gradient of a parameter whose tap was put on in this backward."""
        if any(p.grad is None for p in (*current.reached.values(), *current.gathered)):
            self.require_no_step_in_backward()
        for parameter in written_parameters:
            if id(parameter) in current.reached or parameter in current.gathered:
                continue
            if self.micro_batches or parameter.grad is None:
                raise GradientError(_HOOKED)
            current.gathered[parameter] = parameter.grad.detach().clone()

    def _add_all(self, current: MicroBatch, found: Sequence[Any]) -> None:
        sums = self.guard.sums
        numbers = tuple(itertools.compress(range(len(found)), map(is_tensor, found)))
        if not numbers and not current.reached:
            self.require_no_step_in_backward()
        have_sums = list(map(is_tensor, map(sums.__getitem__, numbers)))
        later = tuple(itertools.compress(numbers, have_sums))
        without = tuple(itertools.compress(numbers, map(operator.not_, have_sums)))
        for some in filter(None, (without, later)):
            self._add(current, some, list(map(found.__getitem__, some)))

    def _add(self, current: MicroBatch, numbers: tuple[int, ...], gradients: list[Tensor]) -> None:
        """Reports gradients of parameters that all have a sum, or none; adds them to it."""
        if numbers not in self._lists:  # the same list each time
            if len(self._lists) == _MOST_LISTS:
                self._lists.clear()
            self._lists[numbers] = [self.parameters[number] for number in numbers]
        first = self.guard.sums[numbers[0]] is None
        sums = None if first else self.guard.sums_before(numbers)
        may_sum = not first and not self.guard.graphs
        batch = MicroBatchGradients(self._lists[numbers], gradients, sums, first, may_sum)
        current.report(batch)
        self.guard.add(numbers, gradients, summed=batch.summed, first=first)

    def _add_at_once(self, parameter: Tensor) -> None:
        """Adds a gradient as soon as it is there; a backward that two reach is refused."""
        current, gradient = self._current, parameter.grad
        if current is None or current.several or not self.guard.hidden or gradient is None:
            return
        if gradient.requires_grad:  # of create_graph=True, which `.grad` keeps
            return
        if id(parameter) in current.reached:
            raise GradientError(TWICE)
        require_dense([gradient])
        self._add(current, (self._numbers[id(parameter)],), [gradient])

    # a backward

    def _begin_hooked_backward(self) -> bool:
        if self._current is not None and not self._subscribers:
            return False
        try:
            self._begin_backward()
        except BaseException as error:
            raise_after_backward(error)
        return True

    def _has_accumulated(self, current: MicroBatch) -> bool:
        if current.reached:
            return True
        return self.guard.found() if self.hides else super()._has_accumulated(current)

    def _end_autograd_grad(self) -> None:
        self.guard.show()
        self._current = None

    def _end_failed(self) -> None:
        # what the failed backward has left is in `.grad`, unless the user has zeroed it since
        if self.guard.found() and not self.guard.is_clean():
            self.guard.give_back()
        super()._end_failed()

    def _abandon(self) -> None:
        super()._abandon()
        self.guard.give_back()
