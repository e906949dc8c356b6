"""Gradients of leaf parameters as autograd computes them: one process, DDP, ZeRO."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.gradients.gradient_hooks import gradient_hook, remove_hooks
from bigbatch.gradients.protocols import OnGradient


class GradientTap:
    """Puts one hook for each parameter where an engine computes gradients.

    Args:
        register: hooks one parameter; None for a source that reads gradients after each backward.
        on_leaves: whether the hooks are on the parameters themselves, so that one shows any
            backward.
    """

    def __init__(
        self,
        register: Callable[[Tensor, OnGradient], RemovableHandle] | None = None,
        *,
        on_leaves: bool = False,
    ) -> None:
        self._register, self.on_leaves = register, on_leaves
        self._handles: dict[Any, RemovableHandle] = {}  # by parameter
        weakref.finalize(self, remove_hooks, self._handles)

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a parameter that the engine does not have."""

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks the parameters that require a gradient and have no hook yet."""
        if self._register is None:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = self._register(parameter, report)

    def detach(self, parameter: Tensor) -> None:
        """Removes the hook of one parameter."""
        if parameter in self._handles:
            self._handles.pop(parameter).remove()

    def close(self) -> None:
        """Removes every hook."""
        remove_hooks(self._handles)

    def parameter_of(self, leaf: Tensor) -> Tensor:
        """The parameter of a leaf of a graph, which an engine may have gathered for a forward."""
        return leaf

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether the gradients of the parameter are reported."""
        return parameter in self._handles


def leaf_tap(*, copies: bool = False) -> GradientTap:
    """A tap by `Tensor.register_hook` on each leaf parameter, which copies no gradient.

    With `copies` it reports copies of gradients on the CPU, for an engine that reduces in their
    memory before a subscriber has read those that it keeps.
    """

    def register(parameter: Tensor, report: OnGradient) -> RemovableHandle:
        def report_copy(parameter: Tensor, gradient: Tensor) -> None:
            report(parameter, gradient.clone() if gradient.is_cpu else gradient)

        hook = gradient_hook(report_copy if copies else report, parameter)
        return parameter.register_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    return GradientTap(register, on_leaves=True)
