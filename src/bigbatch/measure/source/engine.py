"""What sources of engines have in common that join ranks and write to `.grad` themselves."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.measure.source.plain import PlainSource


class EngineSource(PlainSource):
    """Gradients that an engine joins over `groups` of ranks.

    The engine writes to `.grad` between and after backwards, so only what stands there at the end
    of a step is checked; and a micro-batch of several backwards is summed here, since a difference
    of `.grad` may hold other ranks' share.
    """

    _engine_writes = True

    def __init__(self, parameters: Iterable[Tensor], groups: list[dist.ProcessGroup]) -> None:
        self._groups = groups
        super().__init__(parameters)

    def all_reduce(self, values: Tensor) -> None:
        """Sums `values` over the ranks, in place; one all-reduce per group."""
        for group in self._groups:
            dist.all_reduce(values, group=group)

    def _require_known_ranks(self) -> None:
        """They are."""

    def _start_whole(self) -> dict[Tensor, Tensor | None]:
        return {}

    def _gather_whole(self, parameter: Tensor, gradient: Tensor) -> None:
        assert self._whole is not None
        before = self._whole.get(parameter)
        self._whole[parameter] = gradient.clone() if before is None else before.add_(gradient)

    @torch.no_grad()
    def _emit_whole(self) -> None:
        assert self._whole is not None
        for parameter, gradient in self._whole.items():
            assert gradient is not None
            self._emit(parameter, gradient)
        self._whole = None
