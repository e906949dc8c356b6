"""The sums of a step's micro-batch gradients, and who else writes to `.grad`."""

import functools
import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.grad_guard import GradGuard, require_dense

_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_CHECK_INTERVAL = 16  # steps; on a GPU a check waits for the device
is_tensor = functools.partial(operator.is_not, None)  # in C, for `map` and `filter`


class GradSums(GradGuard):
    """Moves gradients out of `.grad` for a backward, and adds what that leaves to their sums.

        outside a backward .grad is S;   inside it starts as None;   after it S <- S + h

    So outside a backward `.grad` is the tensor that this object has put there, or somebody else has
    written to it. Lists are in the order of `parameters`.
    """

    def __init__(self) -> None:
        super().__init__()
        # S of each parameter, None if there is none yet; outside a backward, if it is kept apart
        self.sums: list[Tensor | None] = []
        self.keeps_apart = False  # whether S is another tensor than `.grad`, which users may edit
        self.keeps_apart_next = False  # the same in the next step
        self._is_grad = False  # whether `.grad` was S at the last check
        self._stays_apart = False  # since `.grad` was edited after such a check
        self._steps = 0  # that `settle` has seen
        # what `.grad` was when it was accepted, and the writes to it
        self._accepted: list[weakref.ref[Tensor] | None] = []
        self._writes: list[int] = []
        self._hidden: list[Tensor] = []  # the parameters whose `.grad` is not visible now
        self._visible: list[Tensor | None] = []  # what it is after the backward
        self._graphs: list[Tensor | None] = []  # gradients that have a graph, as they were found
        self._edited = False  # whether a change of `.grad` was accepted in the step

    def restart(self) -> None:
        """Forgets the step."""
        super().restart()
        self.sums, self._edited = [], False
        self._accepted, self._writes = [], []
        self._hidden, self._visible, self._graphs = [], [], []

    # who wrote to .grad

    def grads(self) -> list[Tensor]:
        """Every gradient."""
        return [grad for grad in self.all_grads() if grad is not None]

    def all_grads(self) -> list[Tensor | None]:
        """`.grad` of every parameter."""
        return list(map(_GRAD, self.parameters))

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter."""
        return parameter.grad

    def begin(self, *, foreign_backward: bool) -> None:
        """Raises GradientError where a step cannot begin, because `.grad` is not empty."""
        self.keeps_apart = self.keeps_apart_next
        self.accept()
        if any(map(is_tensor, self._accepted)):
            super().begin(foreign_backward=foreign_backward)
        self.sums = [None] * len(self.parameters) if self.keeps_apart else []

    def accept(self) -> None:
        """Takes `.grad` as it is now for the step's own."""
        grads = self.all_grads()
        self._accepted = [None if grad is None else weakref.ref(grad) for grad in grads]
        self._writes = _versions(grads)

    def accept_edit(self) -> None:
        """Takes `.grad` as it is now, after a change that belongs to the step."""
        self._edited = True
        super().accept_edit()

    def changed(self) -> bool:
        """Whether `.grad` was written to since it was accepted."""
        grads, before = self.all_grads(), [ref and ref() for ref in self._accepted]
        same = len(grads) == len(before) and all(map(operator.is_, grads, before))
        return not same or self._writes != _versions(grads)

    @property
    def grad_edited(self) -> bool:
        """Whether `.grad` is something else than S, up to the factor of `scale`."""
        return self._edited or self.changed()

    def settle(self) -> bool:
        """Decides whether S is `.grad` itself in the next step; returns whether S is to be doubted.

        It is, after a step that kept them apart and found no difference. Once `.grad` was edited
        where it was S, they stay apart for good. Writes through `.data` are not counted, so every
        16th step keeps them apart too. A reader of S calls this once at the end of a step, before
        it writes to `.grad`.
        """
        self._steps += 1
        edited, was_grad = self.grad_edited, self._is_grad
        if self.keeps_apart and not edited:
            edited = not all(map(self._is_sum, self.sums, self.all_grads()))
        self._stays_apart |= edited and was_grad
        self._is_grad = not edited and not self._stays_apart
        self.keeps_apart_next = not self._is_grad or self._steps % _CHECK_INTERVAL == 0
        return edited and was_grad

    def _is_sum(self, total: Tensor | None, grad: Tensor | None) -> bool:
        if total is None or grad is None:
            return total is grad or (grad is not None and not bool(grad.any()))
        return torch.equal(total if self.factor == 1.0 else total * self.factor, grad)

    def sums_of(self, numbers: Sequence[int]) -> list[Tensor | None]:
        """S of parameters by their numbers; None where no micro-batch reached one."""
        is_own = self.keeps_apart or self.factor == 1.0
        sums = self.sums if self.keeps_apart else self.all_grads()
        if is_own and len(sums) == len(self.parameters):
            totals = list(map(sums.__getitem__, numbers))
            if all(map(is_tensor, totals)) and not any(map(_REQUIRES_GRAD, totals)):
                return totals
        return [self._sum_of(sums[number] if number < len(sums) else None) for number in numbers]

    def _sum_of(self, total: Tensor | None) -> Tensor | None:
        total = None if total is None else total.detach()
        if total is None or self.keeps_apart or self.factor == 1.0:
            return total
        return total / self.factor

    # a backward

    def hide(self) -> None:
        """Empties `.grad` for a backward."""
        self._hidden, self._visible = list(self.parameters), self.all_grads()
        if not self.keeps_apart:
            self.sums = list(self._visible)
        for parameter in self._hidden:
            parameter.grad = None

    def show(self) -> None:
        """Puts back what `.grad` was before the backward."""
        for parameter, grad in zip(self._hidden, self._visible, strict=True):
            parameter.grad = grad
        self._hidden, self._visible, self._graphs = [], [], []
        self.sums = self.sums if self.keeps_apart else []

    def give_back(self, added: Collection[int]) -> None:
        """Accumulates what a backward has left, as autograd does, if the micro-batch ends there.

        Args:
            added: numbers of the parameters whose gradient is in the sums already.
        """
        if not self._hidden:
            return
        if not self.keeps_apart:
            for number in added:
                self._visible[number] = self.sums[number]
        for number, gradient in enumerate(map(_GRAD, self._hidden)):
            before = self._visible[number]
            if gradient is not None and number not in added:
                self._visible[number] = gradient if before is None else before.add_(gradient)
        self.show()

    @property
    def has_graphs(self) -> bool:
        """Whether the gradients of this backward have a graph, so that sums are new tensors."""
        return bool(self._graphs)

    def found(self) -> bool:
        """Whether the backward has left any gradient so far."""
        return any(map(is_tensor, map(_GRAD, self._hidden)))

    def take(self) -> list[Tensor | None]:
        """What the backward has left in `.grad` of the hidden parameters, without graphs."""
        found: list[Tensor | None] = list(map(_GRAD, self._hidden))
        present: list[Any] = list(filter(is_tensor, found))
        require_dense(present)
        self._graphs = []
        if any(map(_REQUIRES_GRAD, present)):
            self._graphs = found
            found = [None if grad is None else grad.detach() for grad in found]
        return found

    def sums_before(self, numbers: Sequence[int]) -> list[Tensor]:
        """S of these parameters, which have one."""
        sums: list[Any] = list(map(self.sums.__getitem__, numbers))
        return [total.detach() for total in sums] if self._graphs else sums

    def add(
        self, numbers: Sequence[int], gradients: Sequence[Tensor], *, summed: bool, first: bool
    ) -> None:
        """S <- S + h, unless a reader has done so; the first h becomes S."""
        if self._graphs:  # of create_graph=True, which `.grad` keeps as in any loop
            for number in numbers:
                before, gradient = self.sums[number], self._graphs[number]
                assert gradient is not None
                self.sums[number] = gradient if before is None else before + gradient
        elif first:
            for number, gradient in zip(numbers, gradients, strict=True):
                self.sums[number] = gradient
        elif not summed:
            torch._foreach_add_(self.sums_before(numbers), list(gradients))
        if self.keeps_apart:
            for number, gradient in zip(numbers, gradients, strict=True):
                grad = self._visible[number]
                self._visible[number] = gradient.clone() if grad is None else grad.add_(gradient)

    def end(self) -> None:
        """The micro-batch is complete: `.grad` is the sum."""
        if not self.keeps_apart:
            self._visible = list(self.sums)
        self.show()
        self.accept()

    # a backward that accumulates by itself

    def added_to(self) -> list[int]:
        """Numbers of the parameters whose `.grad` the backward has written to."""
        grads = self.all_grads()
        rows = zip(grads, self._accepted, _versions(grads), self._writes, strict=True)
        return [
            number
            for number, (grad, ref, now, before) in enumerate(rows)
            if now != before or grad is not (ref and ref())
        ]

    def end_accumulated(self) -> None:
        """The micro-batch is complete: the sums are what `.grad` is."""
        self.accept()
        self.sums, self.keeps_apart = [], False


def _versions(grads: Sequence[Tensor | None]) -> list[int]:
    return [-1 if grad is None else grad._version for grad in grads]
