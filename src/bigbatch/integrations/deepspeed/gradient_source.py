"""Gradients under DeepSpeed, at any ZeRO stage."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.leaf_tap import LeafTap
from bigbatch.gradients.rank_reducer import GroupReducer
from bigbatch.gradients.shard_indices import ShardIndices, indices_in_runs
from bigbatch.integrations.deepspeed.zero_layout import Layout, Replicated, Shards


class ZeroSource(GradientSource):
    """Leaf hooks see each rank's own gradient at every stage; the layout has the mean.

    Args:
        engine: DeepSpeed's.
        layout: where that engine keeps the mean gradient.
    """

    def __init__(self, engine: Any, layout: Layout) -> None:
        self._layout = layout
        self.zero = ZeroReducer(engine, layout)
        tap = LeafTap(copies=True)  # DeepSpeed reduces in the memory of the gradient
        guard = ZeroGuard(layout)
        super().__init__(layout.parameters, tap, guard, self.zero)

    def zero_grad(self) -> None:
        """Sets every gradient to None, empties ZeRO's buffers and forgets the step."""
        super().zero_grad()
        self._layout.empty()

    def complete(self) -> None:
        """After a backward: if it was the step's last, puts the mean where it belongs."""
        if self.zero.last:
            self._layout.complete()


class ZeroReducer(GroupReducer):
    """The data-parallel group of an engine, and which elements of a gradient each rank has."""

    lockstep = True

    def __init__(self, engine: Any, layout: Layout) -> None:
        group = engine.data_parallel_group
        super().__init__(dist.get_rank(group), dist.get_world_size(group), [group])
        self._layout, self._engine = layout, weakref.ref(engine)
        self.last = False  # whether the next backward is the last of its step
        self.always = False  # whether every backward reduces

    @property
    def boundary(self) -> bool:
        """Whether the next backward reduces."""
        return self.last or self.always

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """How many ranks have the same part of the mean."""
        return self.ranks if self._layout.whole else 1

    def model_parameters(self, trained: list[Tensor]) -> list[Tensor]:
        """The model's, for which ZeRO has put partitions into the optimizer."""
        return self._layout.parameters

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole gradient."""
        return shape_of(parameter)

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's elements of a tensor shaped like the full gradient."""
        first, length = self._layout.place(parameter)
        return full.reshape(-1)[first : first + length]

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a gradient this rank has."""
        return indices_in_runs(torch.arange(count, device="cpu"), [self._layout.place(parameter)])

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Sets whether the next backward is the last of its step."""
        engine, self.last = self._engine(), requires_sync
        if engine is not None:
            engine.set_gradient_accumulation_boundary(self.boundary)

    def after_scale(self, factor: float) -> None:
        """The gradients were multiplied by `factor`."""
        self._layout.scaled(factor)


class ZeroGuard(GradGuard):
    """Watches this rank's shards of the mean, which ZeRO holds outside `.grad`."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(
            engine_writes=True, local_grad=lambda parameter: self._shards.get(parameter)
        )
        self._layout = layout
        self._shards: Shards = {}  # at the last `stamps`

    def grads(self) -> list[Tensor]:
        """Every shard on this rank."""
        return list(self._shards.values())

    def stamps(self) -> list[Stamp]:
        """The version of every shard now."""
        self._shards = self._layout.shards()
        return [
            None if (shard := self._shards.get(p)) is None else (shard.data_ptr(), shard._version)
            for p in self.parameters
        ]

    def begin(self, *, foreign_backward: bool) -> None:
        """Raises GradientError where ZeRO holds gradients from before the step."""
        if foreign_backward:
            raise GradientError(
                "a backward of your own came before the step, and what it left in ZeRO cannot be "
                "taken out; use engine.backward(loss), and make the engine again"
            )
        self.stamps()  # forgets the shards of the previous step
        super().begin(foreign_backward=foreign_backward)

    def changed_by_foreign_backward(self) -> bool:
        """Above stage 0 it has changed what is accumulated, which `.grad` does not show."""
        return not isinstance(self._layout, Replicated) or super().changed_by_foreign_backward()


def shape_of(parameter: Any) -> torch.Size:
    """The whole shape; at stage 3 parameters are empty between their uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
