"""Gradients under DistributedDataParallel: leaf hooks see each rank's own, `.grad` is the mean.

Or it is what an optimizer made of the mean inside the all-reduce: `FOLDED` knows where.
"""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import SettingError
from bigbatch.gradients.distributed import DistributedSource
from bigbatch.gradients.shard_indices import Held


class Folded(Protocol):
    """Who has the mean gradient where `.grad` holds something else; each rank a piece of it."""

    early: bool
    """Whether the next reduction is none, and leaves each rank its own gradient."""
    layout: int
    """How often it was settled again which rank has which piece."""

    @property
    def done(self) -> bool:
        """Whether that is so in the present step."""

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's elements of the mean gradient, flat."""

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's elements of any tensor that is shaped like the parameter."""

    def held(self, parameter: Tensor, count: int) -> Held:
        """Which of the first `count` elements are among them."""

    def scale(self, factor: float | Tensor) -> None:
        """`.grad` was multiplied."""


FOLDED: WeakKeyDictionary[DistributedDataParallel, Folded] = WeakKeyDictionary()


class DDPSource(DistributedSource):
    """Leaf hooks, as in one process: DDP reduces after them, so they see the local gradient.

    With and without `no_sync`; the last backward of a step has to reduce.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Iterable[Tensor]) -> None:
        group = ddp.process_group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.ddp = ddp
        shared = set(ddp.parameters())
        parameters = list(parameters)
        if any(p.requires_grad and p not in shared for p in parameters):
            raise SettingError("a parameter stands outside the DDP wrapper, so no rank shares it")
        super().__init__(parameters, [group])

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """How many ranks hold the same `local` piece of every gradient."""
        return self.ranks if self._folded is None else 1

    @property
    def layout(self) -> int:  # type: ignore[override]
        """How often it was settled again which rank holds which piece."""
        return 0 if self._folded is None else self._folded.layout

    def synchronize(self, now: bool) -> None:
        """As `no_sync` does: DDP reads it in the forward, so it is set before that.

        The first backward ever of a static graph has to be synchronized: the mean of one that is
        added up before the others is the same mean, and what folds leaves that one alone.
        """
        early = self.ddp.static_graph and not self.ddp._static_graph_delay_allreduce_enqueued
        self.ddp.require_backward_grad_sync = now or early
        folded = FOLDED.get(self.ddp)
        if folded is not None:
            folded.early = early and not now

    def local(self, parameter: Tensor) -> Tensor | None:
        """This rank's piece of the mean gradient."""
        if parameter.grad is None or self._folded is None:
            return parameter.grad
        return self._folded.local(parameter)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor shaped like the whole gradient."""
        return whole if self._folded is None else self._folded.piece(parameter, whole)

    def held(self, parameter: Tensor, count: int) -> Held:
        """Which of the first `count` elements of a gradient this rank holds."""
        folded = self._folded
        return super().held(parameter, count) if folded is None else folded.held(parameter, count)

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, as part of the step."""
        super().scale(factor)
        if self._folded is not None:
            self._folded.scale(factor)

    @property
    def _folded(self) -> Folded | None:
        folded = FOLDED.get(self.ddp)
        return folded if folded is not None and folded.done else None
