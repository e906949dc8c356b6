"""Checks that nobody but the step writes to `.grad`."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import stack_scalars
from bigbatch.gradients.gradient_hooks import accumulated_hook, only_watched, remove, weakly

# Which tensor .grad is, and how often it was written to. The tensor's own id would be free for the
# next tensor; its weak reference is one object while anybody holds it, here the last of the three.
Stamp = tuple[Any, ...] | None


def plain_grad(parameter: Tensor) -> Tensor | None:
    """`.grad` itself."""
    return parameter.grad


class GradGuard:
    """What this rank holds of `.grad`: its version, its sum over micro-batches, its scale.

    Args:
        engine_writes: whether an engine rewrites `.grad` between and after backwards. Then only
            what it holds at the end of a step is checked.
        grad_may_wait: whether a backward may leave `.grad` as it was.
        local: a parameter's gradient on this rank.
    """

    def __init__(
        self,
        *,
        engine_writes: bool = False,
        grad_may_wait: bool = False,
        local: Callable[[Tensor], Tensor | None] = plain_grad,
    ) -> None:
        self.engine_writes, self.grad_may_wait = engine_writes, grad_may_wait
        self.local = local
        self.parameters: list[Tensor] = []  # the source's own list
        self.before: list[Stamp] = []  # the current micro-batch
        self._stamps: list[Stamp] = []  # after the last one
        self._edited = False  # .grad was, as part of the step
        self._scale = 1.0  # of .grad, by `scale`
        self._hidden: dict[Tensor, Tensor] = {}  # .grad that autograd must not see for now
        self._handles: dict[Tensor, RemovableHandle] = {}  # which put it back
        weakref.finalize(self, remove, self._handles)

    def restart(self) -> None:
        """Forgets the step."""
        self._edited, self._scale = False, 1.0
        self._hidden.clear()

    def forget(self, parameter: Tensor) -> None:
        """The parameter is not watched any more."""
        if parameter in self._handles:
            self._handles.pop(parameter).remove()

    def close(self) -> None:
        """Removes every hook."""
        remove(self._handles)

    # versions

    def stamps(self) -> list[Stamp]:
        """The version of every gradient now."""
        return [
            None
            if p.grad is None or (grad := self.local(p)) is None
            else (id(ref := weakref.ref(p.grad)), p.grad._version + grad._version, ref)
            for p in self.parameters
        ]

    def open(self) -> bool:
        """A micro-batch starts; returns whether `.grad` changed since the last one."""
        self.before = self.stamps()
        return self.before != self._stamps

    def accept(self, stamps: list[Stamp] | None = None) -> None:
        """Takes the gradients as they are now, or were at `stamps`, as the step's own."""
        self._stamps = self.stamps() if stamps is None else stamps

    def accept_edit(self) -> None:
        """Takes the gradients as they are, after a change that belongs to the step."""
        self._edited = True
        self.accept()

    def changed(self) -> bool:
        """Whether `.grad` was written to since the last micro-batch."""
        return self.stamps() != self._stamps

    def changed_by_foreign_backward(self) -> bool:
        """The same, at the end of a backward that does not belong to the step."""
        return self.changed()

    def zeroed_since(self) -> bool:
        """Whether all gradients were set to None since the last micro-batch."""
        return any(self._stamps) and not any(self.before)

    def written_to(self, now: list[Stamp] | None = None) -> list[Tensor]:
        """The parameters whose gradient the micro-batch has changed, up to now or to stamps."""
        stamps = self.stamps() if now is None else now
        pairs = zip(self.parameters, self.before, stamps, strict=True)
        return [p for p, before, after in pairs if before != after]

    # values

    def grads(self) -> list[Tensor]:
        """Every gradient on this rank."""
        return [grad for p in self.parameters if (grad := self.local(p)) is not None]

    def begin(self, *, foreign_backward: bool) -> None:
        """Raises GradientError where a step cannot begin, as `.grad` is not empty."""
        if not self.is_clean():
            raise GradientError(
                ".grad is not empty before the first backward of a step; call zero_grad() first"
            )

    def is_clean(self) -> bool:
        """Whether every `.grad` is None, or zero; only the latter reads it."""
        return all_zero(self.grads())

    def is_clean_within_step(self) -> bool:
        """Whether the gradients were zeroed between two micro-batches."""
        return self.is_clean()

    def is_finite(self) -> bool:
        """Whether every gradient is; waits for the device."""
        return all(bool(grad.isfinite().all()) for grad in self.grads())

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        grads = self.grads()
        if grads:  # a rank may have no shard of any
            torch._foreach_mul_(grads, factor)
        self._scale *= factor
        self.accept()

    def added(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What the micro-batch adds to `.grad`, given what a hook has seen."""
        return gradient

    def copies(self) -> dict[Tensor, Tensor | None]:
        """Every gradient as it is now."""
        return {p: None if p.grad is None else p.grad.clone() for p in self.parameters}

    def grad_sum(self, parameter: Tensor, earlier: dict[Tensor, Tensor | None] | None) -> Tensor:
        """What `.grad`, or an earlier copy of it, holds, without `scale`."""
        grad = parameter.grad if earlier is None else earlier[parameter]
        assert grad is not None
        grad = grad.detach() if grad.requires_grad else grad
        return grad if self._scale == 1.0 else grad / self._scale

    @property
    def sums_intact(self) -> bool:
        """Whether `.grad` is what the micro-batches left there; False where an engine writes."""
        return not (self.engine_writes or self._edited or self.changed())

    # accumulation by a subscriber

    def defer_accumulation(self, parameter: Tensor) -> bool:
        """Hides `.grad` from autograd for one accumulation; whether that is possible.

        Autograd then leaves the gradient there without copying it, and the former tensor, with
        the new sum, is put back. Impossible where an engine, a graph or another hook is involved.
        """
        only_ours = len(parameter._backward_hooks or ()) == 1 and only_watched(parameter)
        sums_here = self._scale == 1.0 and not self.engine_writes
        if not (sums_here and only_ours) or torch.is_grad_enabled() or parameter.grad is None:
            return False
        if parameter not in self._handles:
            hook = accumulated_hook(weakly(self._put_back))
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles[parameter] = handle
        self._hidden[parameter] = parameter.grad
        return True

    def reported(self, parameter: Tensor, gradient: Tensor) -> None:
        """Every subscriber has read it; hides `.grad` where its accumulation is deferred."""
        if parameter in self._hidden:
            parameter.grad = None

    def put_back(self) -> bool:
        """Restores every hidden `.grad`; whether autograd had left any unaccumulated."""
        hidden = list(self._hidden)
        for parameter in hidden:
            self._put_back(parameter)
        return bool(hidden)

    def _put_back(self, parameter: Tensor) -> None:
        if parameter in self._hidden:
            parameter.grad = self._hidden.pop(parameter)


def all_zero(tensors: Iterable[Tensor]) -> bool:
    """Whether they hold zeros alone; waits for the device once, if there is anything."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return not filled or not bool(stack_scalars(torch._foreach_norm(filled, torch.inf)).any())
