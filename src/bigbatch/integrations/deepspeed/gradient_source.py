"""Gradients under DeepSpeed, at any ZeRO stage."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from bigbatch.errors import GradientError
from bigbatch.gradients.distributed import DistributedSource
from bigbatch.gradients.shard_indices import Held, held_in_runs
from bigbatch.integrations.deepspeed.zero_layout import Layout, Replicated, Shards


class ZeroSource(DistributedSource):
    """Leaf hooks see each rank's own gradient in all stages; the mean is where the layout has it.

    Args:
        engine: DeepSpeed's.
        layout: its own.
    """

    lockstep = True

    def __init__(self, engine: Any, layout: Layout) -> None:
        self._layout = layout
        group = engine.data_parallel_group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.replicas = self.ranks if self._layout.whole else 1
        self._engine = weakref.ref(engine)
        self._pieces: Shards = {}  # as they were last looked at
        self.last = False  # whether the next backward is the last of its step
        self.always = False  # whether every backward joins the ranks
        super().__init__(self._layout.parameters, [group])

    def behind(self, trained: list[Tensor]) -> list[Tensor]:
        """The model's, for which ZeRO has put partitions into the optimizer."""
        return self._layout.parameters

    def shape(self, parameter: Tensor) -> torch.Size:
        """The whole one."""
        return shape_of(parameter)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor shaped like the whole gradient."""
        first, length = self._layout.place(parameter)
        return whole.reshape(-1)[first : first + length]

    def held(self, parameter: Tensor, count: int) -> Held:
        """Which of the first `count` elements of a gradient this rank holds."""
        return held_in_runs(torch.arange(count, device="cpu"), [self._layout.place(parameter)])

    def synchronize(self, now: bool) -> None:
        """Whether the next backward is the last of its step."""
        engine, self.last = self._engine(), now
        if engine is not None:
            engine.set_gradient_accumulation_boundary(self.boundary)

    @property
    def boundary(self) -> bool:
        """Whether the next backward joins the ranks."""
        return self.last or self.always

    def scale(self, factor: float) -> None:
        """Multiplies every piece of the mean."""
        super().scale(factor)
        self._layout.scaled(factor)

    def complete(self) -> None:
        """After a backward: if it was the last, the mean of all is where it belongs."""
        if self.last:
            self._layout.complete()

    def zero_grad(self) -> None:
        """Empties the gradients, ZeRO's too, and forgets the step."""
        super().zero_grad()
        self._layout.empty()

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        """A copy on the CPU, where small ones are held: DeepSpeed reduces in the same memory."""
        super()._emit(parameter, gradient.clone() if gradient.is_cpu else gradient)

    def _held(self, parameter: Tensor) -> Tensor | None:
        return self._pieces.get(parameter)

    def _grads(self) -> list[Tensor]:
        return list(self._pieces.values())

    def _stamp(self) -> list[Any]:
        self._pieces = self._layout.pieces()
        return [
            None if (piece := self._pieces.get(p)) is None else (piece.data_ptr(), piece._version)
            for p in self.parameters
        ]

    def _begin(self) -> None:
        if self.foreign_backward and not self._begun:
            raise GradientError(
                "a backward of your own came before the step, and what it left in ZeRO cannot be "
                "taken out; use engine.backward(loss), and make the engine again"
            )
        if not self._begun:
            self._stamp()  # looks at the pieces again: those of the step before are gone
        super()._begin()

    @_disable_dynamo
    def _foreign_ended(self) -> None:
        """Above stage 0 it has changed what is accumulated, where `.grad` does not show it."""
        if isinstance(self._layout, Replicated):
            super()._foreign_ended()
        else:
            self.foreign_backward = True


def shape_of(parameter: Any) -> torch.Size:
    """The whole one; at stage 3 parameters are empty between their uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
