"""Sums in float32 of a step's gradients of half types."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.gradients.gradient_hooks import remove_hooks, watching_hook, weak_method, weakly


class Float32Sums:
    """Adds up gradients of half types in float32; `.grad` is that sum, rounded once.

        S <- S + h in float32;   .grad <- S in its own type

    Two hooks on each parameter do it: the first makes `.grad` empty, so that autograd leaves h
    there, the second comes right after that, before an engine reduces `.grad`. Hooks that read
    gradients see h as ever. S has 4 bytes an element, from its first gradient to the step's end.

    Args:
        is_counted: whether the present backward belongs to the step.
    """

    def __init__(self, is_counted: Callable[[], bool]) -> None:
        self._is_counted = is_counted
        self._sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Any, Any] = {}
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Hooks the parameters of half types that have no hook yet."""
        for parameter in filter(is_half, parameters):
            if parameter.requires_grad and (parameter, 0) not in self._handles:
                hooks = (
                    watching_hook(weakly(weak_method(self._empty), parameter)),
                    watching_hook(weak_method(self._add)),
                )
                register: Any = parameter.register_hook
                self._handles[parameter, 0] = register(hooks[0])
                register = parameter.register_post_accumulate_grad_hook
                self._handles[parameter, 1] = register(hooks[1])

    def detach(self) -> None:
        """Removes all hooks."""
        remove_hooks(self._handles)

    def restart(self) -> None:
        """Forgets the step, and frees its memory."""
        self._sums.clear()

    def of(self, parameter: Tensor) -> Tensor | None:
        """S of a parameter; None before its first gradient."""
        return self._sums.get(parameter)

    def _empty(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter in self._sums and self._is_counted():
            parameter.grad = None

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self._is_counted():
            return
        if gradient.requires_grad:
            raise GradientError(
                "accumulate_float32_above= adds up gradients without their graphs: leave "
                "create_graph=True out, or accumulate_float32_above="
            )
        if (total := self._sums.get(parameter)) is None:
            self._sums[parameter] = gradient.float()
        else:
            gradient.copy_(total.add_(gradient))


def is_half(parameter: Tensor) -> bool:
    """Whether sums of a parameter's gradients are rounded to a half type."""
    return parameter.is_floating_point() and parameter.dtype not in FULL_PRECISION
