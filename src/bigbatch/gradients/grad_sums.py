"""The sums of a step's micro-batch gradients, which a backward does not see in `.grad`."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.grad_guard import GradGuard, is_tensor, require_dense

_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_CHECK_INTERVAL = 16  # steps; on a GPU a check waits for the device


class GradSums(GradGuard):
    """Moves gradients out of `.grad` for a backward, and adds what that leaves to their sums.

        outside a backward .grad is S;   inside it starts as None;   after it S <- S + h

    So outside a backward `.grad` is the tensor that this object has put there, or somebody else has
    written to it. Lists are in the order of `parameters`, and numbers are places in them.
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
        self.hidden: list[Tensor] = []  # the parameters whose `.grad` is not visible now
        self._visible: list[Tensor | None] = []  # what it is after the backward
        # gradients that have a graph, as they were found; their sums are new tensors
        self.graphs: list[Tensor | None] = []
        self._edited = False  # whether a change of `.grad` was accepted in the step

    def restart(self) -> None:
        """Forgets the step."""
        self.factor, self.sums, self._edited = 1.0, [], False

    def begin(self) -> None:
        """Raises GradientError where a step cannot begin, because `.grad` is not empty."""
        super().begin()
        self.keeps_apart = self.keeps_apart_next
        self.sums = [None] * len(self.parameters) if self.keeps_apart else []

    def accept_edit(self) -> None:
        """Takes `.grad` as it is now, after a change that belongs to the step."""
        self._edited = True
        super().accept_edit()

    def settle(self) -> bool:
        """Decides whether S is `.grad` itself in the next step; returns whether S is to be doubted.

        It is, after a step that kept them apart and found no difference; never again once `.grad`
        was edited where it was S; not in each 16th step, as writes through `.data` are not counted.
        A reader of S calls this once at the end of a step, before it writes to `.grad`.
        """
        self._steps += 1
        edited, was_grad = self._edited or self.changed(), self._is_grad
        if self.keeps_apart and not edited:
            edited = not all(map(self._is_sum, self.sums, map(_GRAD, self.parameters)))
        self._stays_apart |= edited and was_grad
        self._is_grad = not edited and not self._stays_apart
        self.keeps_apart_next = not self._is_grad or self._steps % _CHECK_INTERVAL == 0
        return edited and was_grad

    def _is_sum(self, total: Tensor | None, grad: Tensor | None) -> bool:
        if total is None or grad is None:
            return total is grad or (grad is not None and not bool(grad.any()))
        return torch.equal(total if self.factor == 1.0 else total * self.factor, grad)

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter; None where no micro-batch reached one."""
        if self.keeps_apart:
            places = dict(zip(map(id, self.parameters), self.sums, strict=False))
            totals, factor = list(map(places.get, map(id, parameters))), 1.0
        else:
            totals, factor = list(map(_GRAD, parameters)), self.factor
        if any(map(_REQUIRES_GRAD, filter(is_tensor, totals))):
            totals = [total if total is None else total.detach() for total in totals]
        if factor == 1.0:
            return totals
        return [total if total is None else total / factor for total in totals]

    # a backward

    def hide(self) -> None:
        """Empties `.grad` for a backward."""
        self.hidden, self._visible = list(self.parameters), list(map(_GRAD, self.parameters))
        if not self.keeps_apart:
            self.sums = self._visible  # one list
        for parameter in self.hidden:
            parameter.grad = None

    def show(self) -> None:
        """The backward is over: `.grad` is what it was before, and what was added to it since."""
        for parameter, grad in zip(self.hidden, self._visible, strict=True):
            parameter.grad = grad
        self.hidden, self._visible, self.graphs = [], [], []
        if not self.keeps_apart:
            self.sums = []

    def give_back(self) -> None:
        """Accumulates what a backward has left, as autograd does, if the micro-batch ends there."""
        for number, gradient in enumerate(map(_GRAD, self.hidden)):
            before = self._visible[number]
            if gradient is not None and gradient is not before:  # not in the sums yet
                self._visible[number] = gradient if before is None else before.add_(gradient)
        self.show()

    def found(self) -> bool:
        """Whether the backward has left any gradient so far."""
        return any(map(is_tensor, map(_GRAD, self.hidden)))

    def take(self) -> list[Tensor | None]:
        """What the backward has left in `.grad` of the hidden parameters, without graphs."""
        pairs = zip(map(_GRAD, self.hidden), self._visible, strict=True)
        found: list[Tensor | None] = [None if grad is total else grad for grad, total in pairs]
        present: list[Any] = list(filter(is_tensor, found))
        require_dense(present)
        self.graphs = []
        if any(map(_REQUIRES_GRAD, present)):
            self.graphs = found
            found = [None if grad is None else grad.detach() for grad in found]
        return found

    def sums_before(self, numbers: Sequence[int]) -> list[Tensor]:
        """S of these parameters, which have one."""
        sums: list[Any] = list(map(self.sums.__getitem__, numbers))
        return [total.detach() for total in sums] if self.graphs else sums

    def add(
        self, numbers: Sequence[int], gradients: Sequence[Tensor], *, summed: bool, first: bool
    ) -> None:
        """S <- S + h, unless a reader has done so; the first h becomes S."""
        if self.graphs:  # of create_graph=True, which `.grad` keeps as in any loop
            for number in numbers:
                before, gradient = self.sums[number], self.graphs[number]
                assert gradient is not None
                self.sums[number] = gradient if before is None else before + gradient
        elif first:
            for number, gradient in zip(numbers, gradients, strict=True):
                self.sums[number] = gradient
        elif not summed:
            torch._foreach_add_(self.sums_before(numbers), list(gradients))
        for number, gradient in zip(numbers, gradients, strict=True):
            if self.keeps_apart:
                grad = self._visible[number]
                self._visible[number] = gradient.clone() if grad is None else grad.add_(gradient)
            self.hidden[number].grad = self._visible[number]  # which is in the sums
