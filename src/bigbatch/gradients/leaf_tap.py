"""Gradients of leaf parameters as autograd computes them: one process, DDP, ZeRO."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.gradients.gradient_hooks import gradient_hook, remove_hooks
from bigbatch.gradients.protocols import OnGradient


class GradientTap:
    """Puts one hook for each parameter where an engine computes gradients.

    This class puts none, for a source that reads its gradients after each backward.
    """

    on_leaves = False
    """Whether the hooks are on the parameters themselves, so that one shows any backward."""

    def __init__(self) -> None:
        self._handles: dict[Any, RemovableHandle] = {}  # by parameter
        weakref.finalize(self, remove_hooks, self._handles)

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a parameter that the engine does not have."""

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks the parameters that require a gradient and have no hook yet."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                handle = self.register(parameter, report)
                if handle is not None:
                    self._handles[parameter] = handle

    def register(self, parameter: Tensor, report: OnGradient) -> RemovableHandle | None:
        """Hooks one parameter; None where the source has no use for a hook."""
        return None

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


class LeafTap(GradientTap):
    """Puts `Tensor.register_hook` on each leaf parameter; copies no gradient.

    Args:
        copies: reports copies of gradients on the CPU, for an engine that reduces in their memory
            before a subscriber has read those that it keeps.
    """

    on_leaves = True

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self._copies = copies

    def register(self, parameter: Tensor, report: OnGradient) -> RemovableHandle:
        """Hooks one parameter."""
        hook = gradient_hook(_copying(report) if self._copies else report, parameter)
        return parameter.register_hook(hook)  # type: ignore[no-untyped-call,no-any-return]


def _copying(report: OnGradient) -> OnGradient:
    def report_copy(parameter: Tensor, gradient: Tensor) -> None:
        report(parameter, gradient.clone() if gradient.is_cpu else gradient)

    return report_copy
