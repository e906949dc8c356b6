"""What a source has of `.grad`, and who else writes to it."""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import stacked

Stamp = tuple[Any, ...] | None
"""Which tensor `.grad` is, and how often it was written to; None without a gradient."""

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")
_DTYPE, _VERSION = operator.attrgetter("dtype"), operator.attrgetter("_version")
is_tensor = functools.partial(operator.is_not, None)  # in C, for `map` and `filter`


# [Note: Integrity of .grad]
# Statistics and r are computed from the sums of a step. If `.grad` was clipped, zeroed or written
# to by a backward of the user's own between two micro-batches, they are plausible and wrong, so
# such a step is refused. To compare values would wait for the device; but autograd counts the
# writes to a tensor, also those of a clipping whose factor is 1, though none through `.data`.
# Another tensor, or another number of writes, is somebody else's doing. Values are read only then,
# as the user may have called zero_grad(), which begins a new step; and before a step's first
# micro-batch, where `.grad` is not None. An engine writes between and after backwards, so only what
# it holds at the end of a step is checked.
# The id of a tensor that is gone may be that of the next. Its weak reference is one object while
# anybody holds it, so a stamp holds that, and has its id. A DTensor and its local shard are counted
# apart, so both versions are added.
class GradGuard:
    """Notices who else than a source writes to `.grad`; see [Note: Integrity of .grad].

    Args:
        grad_may_wait: whether a backward may leave `.grad` as it was.
        local_grad: returns this rank's part of the gradient of a parameter.
    """

    def __init__(
        self, *, grad_may_wait: bool = False, local_grad: Callable[[Tensor], Tensor | None] = _GRAD
    ) -> None:
        self.parameters: list[Tensor] = []  # the source's own list
        self.factor = 1.0  # by which `scale` multiplied .grad in the step
        self.grad_may_wait = grad_may_wait
        self.local_grad = local_grad
        self.stamps_before: list[Stamp] = []  # before the current micro-batch
        self._stamps: list[Stamp] = []  # after the last micro-batch

    def restart(self) -> None:
        """Forgets the step."""
        self.factor = 1.0

    def grads(self) -> list[Tensor]:
        """Every gradient on this rank."""
        grads: Any = filter(is_tensor, map(self.local_grad, self.parameters))
        return list(grads)

    def begin(self) -> None:
        """Raises GradientError where a step cannot begin, because `.grad` is not empty."""
        if not self.is_clean():
            raise GradientError(
                ".grad is not empty before the first backward of a step; call zero_grad() first"
            )

    def stamps(self) -> list[Stamp]:
        """The version of every gradient now."""
        grads: list[Any] = list(map(_GRAD, self.parameters))
        if self.local_grad is _GRAD and all(map(is_tensor, grads)):  # in C
            refs = list(map(weakref.ref, grads))
            return list(zip(map(id, refs), map(_VERSION, grads), refs, strict=True))
        local_grads: list[Any] = list(map(self.local_grad, self.parameters))
        return [
            None
            if grad is None
            else (
                id(ref := weakref.ref(grad)),
                grad._version + (0 if local_grad is grad else local_grad._version),
                ref,
            )
            for grad, local_grad in zip(grads, local_grads, strict=True)
        ]

    def open_micro_batch(self) -> bool:
        """A micro-batch starts; returns whether `.grad` changed since the last one."""
        self.stamps_before = self.stamps()
        return self.stamps_before != self._stamps

    def accept(self, stamps: list[Stamp] | None = None) -> None:
        """Takes the gradients as they are now, or were at `stamps`, as the step's own."""
        self._stamps = self.stamps() if stamps is None else stamps

    def accept_edit(self) -> None:
        """Takes `.grad` as it is now, after a change that belongs to the step."""
        self.accept()

    def changed(self) -> bool:
        """Whether `.grad` was written to since it was accepted."""
        return self.stamps() != self._stamps

    def changed_by_foreign_backward(self) -> bool:
        """Whether a backward that does not belong to the step, and ends now, wrote to `.grad`."""
        return self.changed()

    def all_set_to_none(self) -> bool:
        """Whether all gradients were set to None between the last two micro-batches."""
        return any(self._stamps) and not any(self.stamps_before)

    def written_parameters(self, stamps: list[Stamp]) -> list[Tensor]:
        """The parameters whose gradient the micro-batch has changed, up to these stamps."""
        versions = zip(self.parameters, self.stamps_before, stamps, strict=True)
        return [p for p, old, new in versions if old != new]

    def is_clean(self) -> bool:
        """Whether every `.grad` is None or zero; reads the values only if one is not None."""
        return all_zero(self.grads())

    def is_clean_within_step(self) -> bool:
        """Whether the gradients were zeroed between two micro-batches."""
        return self.is_clean()

    def was_zeroed(self) -> bool:
        """Whether somebody emptied or zeroed every gradient since the last micro-batch."""
        return self.stamps() != self._stamps and self.is_clean_within_step()

    def is_finite(self) -> bool:
        """Whether every gradient is finite; waits for the device."""
        return all(bool(grad.isfinite().all()) for grad in self.grads())

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        grads = self.grads()
        if grads:  # a rank may have no shard of any
            torch._foreach_mul_(grads, factor)
        self.factor *= factor
        self.accept()


def require_dense(gradients: Iterable[Tensor]) -> None:
    """Raises GradientError for gradients that are sparse or complex."""
    layouts, dtypes = set(map(_LAYOUT, gradients)), set(map(_DTYPE, gradients))
    if layouts <= {torch.strided} and not any(dtype.is_complex for dtype in dtypes):
        return
    for gradient in gradients:
        if gradient.layout != torch.strided or gradient.is_complex():
            raise GradientError(
                f"a {gradient.dtype} gradient of layout {gradient.layout} cannot be measured; use "
                "dense real gradients, for embeddings sparse=False"
            )


def all_zero(tensors: Iterable[Tensor]) -> bool:
    """Whether the tensors hold zeros alone; waits for the device once, if there are elements."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    return not nonempty or not bool(stacked(torch._foreach_norm(nonempty, torch.inf)).any())
