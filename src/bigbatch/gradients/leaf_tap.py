"""Gradients of leaf parameters as autograd computes them: one process, DDP, ZeRO."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import SettingError
from bigbatch.gradients.gradient_hooks import gradient_hook, remove
from bigbatch.gradients.protocols import OnGradient


class HookTap:
    """A tap with one hook for each parameter."""

    on_leaves = True

    def __init__(self) -> None:
        self._handles: dict[Tensor, RemovableHandle] = {}
        weakref.finalize(self, remove, self._handles)

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a complex parameter that requires a gradient."""
        if parameter.is_complex() and parameter.requires_grad:
            raise SettingError(
                "a complex parameter cannot be measured; hold torch.view_as_real of it"
            )

    def detach(self, parameter: Tensor) -> None:
        """Removes the hook of one parameter."""
        if parameter in self._handles:
            self._handles.pop(parameter).remove()

    def close(self) -> None:
        """Removes every hook."""
        remove(self._handles)

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether its gradients are reported."""
        return parameter in self._handles


class LeafTap(HookTap):
    """Puts `Tensor.register_hook` on each leaf parameter; copies no gradient.

    Args:
        copies: reports copies of gradients on the CPU, for an engine that reduces in their memory
            before a subscriber has read those that it keeps.
    """

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self._copies = copies

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks those that require a gradient and have no hook yet."""
        reported = _copied(report) if self._copies else report
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                hook = gradient_hook(reported, weakref.ref(parameter))
                self._handles[parameter] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _copied(report: OnGradient) -> OnGradient:
    def copy(parameter: Tensor, gradient: Tensor) -> None:
        report(parameter, gradient.clone() if gradient.is_cpu else gradient)

    return copy
