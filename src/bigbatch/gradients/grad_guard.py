"""Checks that only the step writes to `.grad`."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import stack_scalars
from bigbatch.gradients.gradient_hooks import only_watched, remove_hooks, watching_hook, weak_method

Stamp = tuple[Any, ...] | None
"""Which tensor `.grad` is, and how often it was written to; None without a gradient."""

_GRAD = operator.attrgetter("grad")


# [Note: Integrity of .grad]
# Statistics and r are computed from `.grad` at the end of a step. If it was clipped, zeroed or
# written to by a backward of the user's own in between, they are plausible and wrong, so such a
# step is refused. To compare values would read all gradients and wait for the device. Instead:
# - Autograd counts the writes to a tensor, also those of a clipping whose factor is 1. A stamp is
#   (which tensor, its version); stamps differ if anybody wrote between two micro-batches.
# - The id of a tensor that is gone may be that of the next. Its weak reference is one object while
#   anybody holds it, so the stamp holds that, and has its id.
# - Engines write to `.grad` between and after backwards (`engine_writes`). Then only the end of a
#   step is checked. A DTensor and its local shard are counted apart, so both versions are added.
# - Values are read only where stamps differ between micro-batches, as the user may have called
#   zero_grad(), which begins a new step; and before the first one, where `.grad` is not None.
# - Writes through `.data` are not counted. Where VR optimizers rely on the sums, they compare some
#   (`optim/local_step.py`).
class GradGuard:
    """What this rank holds of `.grad`: its version, its sum over micro-batches, its scale.

    See [Note: Integrity of .grad].

    Args:
        engine_writes: whether an engine rewrites `.grad` between and after backwards. Then only
            what it holds at the end of a step is checked.
        grad_may_wait: whether a backward may leave `.grad` as it was.
        local_grad: returns this rank's part of the gradient of a parameter.
    """

    def __init__(
        self,
        *,
        engine_writes: bool = False,
        grad_may_wait: bool = False,
        local_grad: Callable[[Tensor], Tensor | None] = _GRAD,
    ) -> None:
        self.engine_writes, self.grad_may_wait = engine_writes, grad_may_wait
        self.local_grad = local_grad
        self.parameters: list[Tensor] = []  # the source's own list
        self.stamps_before: list[Stamp] = []  # before the current micro-batch
        self._stamps: list[Stamp] = []  # after the last micro-batch
        self._edited = False  # whether `accept_edit` was called in the step
        self._factor = 1.0  # by which `scale` multiplied .grad in the step
        self._grads_before: dict[Tensor, Tensor | None] | None = None  # see `start_total`
        self._totals: dict[Tensor, Tensor] | None = None  # likewise
        self._hidden_grads: dict[Tensor, Tensor] = {}  # .grad that autograd must not see for now
        self._handles: dict[Tensor, RemovableHandle] = {}  # of the hooks that restore it
        weakref.finalize(self, remove_hooks, self._handles)

    def restart(self) -> None:
        """Forgets the step."""
        self._edited, self._factor = False, 1.0
        self._grads_before = self._totals = None
        self._hidden_grads.clear()

    def forget(self, parameter: Tensor) -> None:
        """Removes the hook of a parameter that is no longer watched."""
        if parameter in self._handles:
            self._handles.pop(parameter).remove()

    def close(self) -> None:
        """Removes every hook."""
        remove_hooks(self._handles)

    # versions

    def stamps(self) -> list[Stamp]:
        """The version of every gradient now, as [Note: Integrity of .grad] has it."""
        if self.local_grad is _GRAD:  # one tensor a parameter, and the usual case
            grads = [p.grad for p in self.parameters]
            return [
                None if grad is None else (id(ref := weakref.ref(grad)), grad._version, ref)
                for grad in grads
            ]
        return [
            None
            if (grad := p.grad) is None or (local_grad := self.local_grad(p)) is None
            else (id(ref := weakref.ref(grad)), grad._version + local_grad._version, ref)
            for p in self.parameters
        ]

    def open_micro_batch(self) -> bool:
        """A micro-batch starts; returns whether `.grad` changed since the last one."""
        self.stamps_before = self.stamps()
        return self.stamps_before != self._stamps

    def accept(self, stamps: list[Stamp] | None = None) -> None:
        """Takes the gradients as they are now, or were at `stamps`, as the step's own."""
        self._stamps = self.stamps() if stamps is None else stamps

    def accept_edit(self) -> None:
        """Takes the gradients as they are now, after a change that belongs to the step."""
        self._edited = True
        self.accept()

    def changed(self) -> bool:
        """Whether `.grad` was written to since the last micro-batch."""
        return self.stamps() != self._stamps

    def changed_by_foreign_backward(self) -> bool:
        """Whether a backward that does not belong to the step, and ends now, wrote to `.grad`."""
        return self.changed()

    def all_set_to_none(self) -> bool:
        """Whether all gradients were set to None between the last two micro-batches."""
        return any(self._stamps) and not any(self.stamps_before)

    def was_zeroed(self) -> bool:
        """Whether somebody emptied or zeroed every gradient since the last micro-batch."""
        return self.changed() and self.is_clean_within_step()

    def written_parameters(self, stamps: list[Stamp] | None = None) -> list[Tensor]:
        """The parameters whose gradient the micro-batch has changed, up to now or to `stamps`."""
        after = self.stamps() if stamps is None else stamps
        versions = zip(self.parameters, self.stamps_before, after, strict=True)
        return [p for p, old, new in versions if old != new]

    # values

    def grads(self) -> list[Tensor]:
        """Every gradient on this rank."""
        return [grad for p in self.parameters if (grad := self.local_grad(p)) is not None]

    def begin(self, *, foreign_backward: bool) -> None:
        """Raises GradientError where a step cannot begin, because `.grad` is not empty."""
        if not self.is_clean():
            raise GradientError(
                ".grad is not empty before the first backward of a step; call zero_grad() first"
            )

    def is_clean(self) -> bool:
        """Whether every `.grad` is None or zero; reads the values only if one is not None."""
        return all_zero(self.grads())

    def is_clean_within_step(self) -> bool:
        """Whether the gradients were zeroed between two micro-batches."""
        return self.is_clean()

    def is_finite(self) -> bool:
        """Whether every gradient is finite; waits for the device."""
        return all(bool(grad.isfinite().all()) for grad in self.grads())

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        grads = self.grads()
        if grads:  # a rank may have no shard of any
            torch._foreach_mul_(grads, factor)
        self._factor *= factor
        self.accept()

    def added_by(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What the micro-batch adds to `.grad`, computed from the gradient that a hook reports."""
        return gradient

    def grad_sum(self, parameter: Tensor) -> Tensor:
        """This rank's part of the sum of what the complete micro-batches added to `.grad`.

        Read only. Correct where `sums_intact`, during a backward too.
        """
        grads_before = self._grads_before
        grad = parameter.grad if grads_before is None else grads_before[parameter]
        assert grad is not None
        grad = grad.detach() if grad.requires_grad else grad
        return grad if self._factor == 1.0 else grad / self._factor

    @property
    def sums_intact(self) -> bool:
        """Whether `grad_sum` is what the micro-batches left; False where an engine writes."""
        return not (self.engine_writes or self._edited or self.changed())

    # a micro-batch of several backwards

    def start_total(self) -> None:
        """Starts the total of several backwards, for one copy of the gradient.

        It is the difference of `.grad`, which holds what hooks of the user return. Where an engine
        writes, a difference may hold other ranks' share, so the gradients are summed.
        """
        if self.engine_writes:
            self._totals = {}
        else:
            grads = {p: p.grad for p in self.parameters}
            self._grads_before = {p: None if g is None else g.clone() for p, g in grads.items()}

    def add_to_total(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Adds the gradient of one backward to the total; False where no total was started."""
        if self._totals is not None:
            total = self._totals.get(parameter)
            self._totals[parameter] = gradient.clone() if total is None else total.add_(gradient)
        return self._totals is not None or self._grads_before is not None

    def end_total(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the parameters that were reached and their totals; `grad_sum` has none of them."""
        yield from (self._totals or {}).items()
        grads_before = self._grads_before or {}
        for parameter in self.written_parameters() if grads_before else ():
            if parameter.grad is not None:
                grad, before = parameter.grad.detach(), grads_before[parameter]
                yield parameter, grad if before is None else grad - before
        self._grads_before = self._totals = None

    # accumulation by a subscriber

    def defer_accumulation(self, parameter: Tensor) -> bool:
        """Whether the subscriber has to add the gradient it was given to `grad_sum` itself.

        For one that reads and writes there anyway, so that autograd need not do so again. Asked in
        `gradient`, once; a yes is binding. Hides `.grad` from autograd for one accumulation:
        autograd then leaves the gradient there without copying it, and the former tensor, with the
        new sum, is put back. Impossible where an engine, a graph or another hook is involved.
        """
        only_ours = len(parameter._backward_hooks or ()) == 1 and only_watched(parameter)
        accumulates = self._factor == 1.0 and not self.engine_writes and self._grads_before is None
        if not (accumulates and only_ours) or torch.is_grad_enabled() or parameter.grad is None:
            return False
        if parameter not in self._handles:
            hook = watching_hook(weak_method(self._restore))
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles[parameter] = handle
        self._hidden_grads[parameter] = parameter.grad
        return True

    def after_report(self, parameter: Tensor, gradient: Tensor) -> None:
        """Every subscriber has read it; hides `.grad` where its accumulation is deferred."""
        if self._hidden_grads and parameter in self._hidden_grads:
            parameter.grad = None

    def restore_hidden(self) -> bool:
        """Restores every hidden `.grad`; returns whether autograd had not accumulated to one."""
        hidden = list(self._hidden_grads)
        for parameter in hidden:
            self._restore(parameter)
        return bool(hidden)

    def _restore(self, parameter: Tensor) -> None:
        if parameter in self._hidden_grads:
            parameter.grad = self._hidden_grads.pop(parameter)


def all_zero(tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors hold zeros alone; waits for the device once, if there are elements."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    return not nonempty or not bool(stack_scalars(torch._foreach_norm(nonempty, torch.inf)).any())
