"""Reduced gradients of sharded parameters (FSDP2, ZeRO): each rank sees its own piece of them."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from bigbatch.errors import GradientError
from bigbatch.gradients.gradient_hooks import accumulated_hook
from bigbatch.gradients.single_process import SingleProcessSource, all_zero


class ShardedSource(SingleProcessSource):
    """Watches the local pieces of `.grad` with post-accumulate hooks; nothing is communicated.

    An engine that reduces in every backward leaves the sum so far, S_j, in the piece; what the
    micro-batch of all ranks together added is S_j - S_{j-1}, for a copy of the piece. So k is the
    accumulation alone, and a backward whose gradient is not synchronized is not seen.
    """

    joined = True
    _engine_writes = True
    _grad_may_wait = True  # autograd.grad runs no hook here, so every backward that is seen counts

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._sums: dict[Tensor, Tensor] = {}  # S_{j-1}
        self._arriving: Tensor | None = None  # the parameter whose hook runs
        super().__init__(parameters)

    def sum_of(self, parameter: Tensor) -> Tensor:
        """This rank's piece of S_j, in a buffer that nobody else knows."""
        return self._sums[parameter]

    @property
    def sums_intact(self) -> bool:
        """They are."""
        return True

    def _held(self, parameter: Tensor) -> Tensor | None:
        return local_grad(parameter)

    def _require_known_ranks(self) -> None:
        """The engine knows them; nothing is sent from here."""

    def _open(self, weight: float) -> None:
        super()._open(weight)
        if not self.micro_batches:
            self._sums.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        piece, self._arriving = self.local(parameter), parameter
        assert piece is not None
        self._gradient(parameter, piece)
        self._arriving = None

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        before = self._sums.get(parameter)
        super()._emit(parameter, gradient if before is None else gradient - before)
        if before is None:
            self._sums[parameter] = gradient.clone()
        else:
            before.copy_(gradient)

    def _is_clean(self) -> bool:
        """Whether the other pieces are; this one holds the gradient already.

        Within a step that is not asked of the data, which may be zero on one rank only: what was
        written to more than once since the last micro-batch is refused, on every rank alike.
        """
        if self.micro_batches:
            for was, now in zip(self._stamps, self._before, strict=True):
                if was and (now is None or now[0] != was[0]):
                    return True  # set to None since
                if was and now and now[1] - was[1] > 1:
                    raise GradientError(
                        ".grad was written to between two backwards of a step; where a step was "
                        "left out, call optimizer.zero_grad(), or zero_grad(set_to_none=True)"
                    )
            return False
        left = [p for p in self.parameters if p is not self._arriving]
        return all_zero(piece for p in left if (piece := self.local(p)) is not None)

    def _hook(self) -> None:
        for parameter in self.parameters if self._listens else ():
            if parameter.requires_grad and parameter not in self._handles:
                hook = accumulated_hook(weakref.WeakMethod(self._accumulated))
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle


def local_grad(parameter: Tensor) -> Tensor | None:
    """This rank's piece of `.grad`, whether that is a DTensor or plain."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad
