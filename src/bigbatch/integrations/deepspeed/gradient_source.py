"""Gradients under DeepSpeed, at any ZeRO stage."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.rank_reducer import GroupReducer, ShardIndices, indices_in_runs
from bigbatch.integrations.deepspeed.engine_steps import EngineSteps
from bigbatch.integrations.deepspeed.zero_layout import Layout, Replicated, Shards, shape_of


class ZeroSource(GradientSource):
    """Reads each rank's own gradient by leaf hooks, at every stage; the layout has the mean.

    The engine runs every backward and step.
    """

    engine: EngineSteps

    def __init__(self, engine: Any, layout: Layout) -> None:
        self._layout, self.engine = layout, EngineSteps(engine, layout)
        reducer = ZeroReducer(engine.data_parallel_group, layout, self.engine)
        super().__init__(layout.parameters, ZeroGuard(layout), reducer)

    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reads a copy on a CPU, where DeepSpeed reduces in place before all readers are done."""
        super()._on_gradient(parameter, gradient.clone() if gradient.is_cpu else gradient)

    def _begin_step(self) -> None:
        """Raises GradientError where ZeRO holds gradients from before the step."""
        if self.foreign_backward:
            raise GradientError(
                "a backward of your own came before the step, and its gradients in ZeRO cannot be "
                "removed; use engine.backward(loss), and make the engine again"
            )
        super()._begin_step()

    def zero_grad(self) -> None:
        """Sets every gradient to None, empties ZeRO's buffers and forgets the step."""
        super().zero_grad()
        self._layout.zero_unreached()


class ZeroReducer(GroupReducer):
    """The data-parallel group of an engine, and which elements of a gradient each rank has."""

    lockstep = True

    def __init__(self, group: dist.ProcessGroup, layout: Layout, engine: EngineSteps) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), [group])
        self._layout, self._engine = layout, engine

    @property
    def replicas(self) -> int:  # type: ignore[override]
        """How many ranks have the same part of the mean."""
        return self.ranks if self._layout.replicated else 1

    def model_parameters(self, trained: list[Tensor]) -> list[Tensor]:
        """The model's parameters, in whose place ZeRO lets the optimizer step flat partitions."""
        return self._layout.parameters

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole gradient."""
        return shape_of(parameter)

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's elements of a tensor shaped like the full gradient."""
        start, length = self._layout.shard_range(parameter)
        return full.reshape(-1)[start : start + length]

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a gradient this rank has."""
        run = self._layout.shard_range(parameter)
        return indices_in_runs(torch.arange(count, device="cpu"), [run])

    def set_requires_gradient_sync(self, requires_sync: bool) -> None:
        """Sets whether the next backward is the last of its step."""
        self._engine.set_last(requires_sync)

    def after_scale(self, factor: float) -> None:
        """Multiplies the norms that DeepSpeed has computed, after the gradients."""
        self._layout.scale_norms(factor)


class ZeroGuard(GradGuard):
    """Watches this rank's shards of the mean, which ZeRO holds outside `.grad`."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(local_grad=lambda parameter: self._shards.get(parameter))
        self._layout = layout
        self._shards: Shards = {}  # as of the last call of `stamps`

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

    def begin(self) -> None:
        """Raises GradientError where ZeRO holds gradients from before the step."""
        self.stamps()  # forgets the shards of the previous step
        super().begin()

    def changed_by_foreign_backward(self) -> bool:
        """Always above stage 0, where `.grad` does not show what a backward has accumulated."""
        return not isinstance(self._layout, Replicated) or super().changed_by_foreign_backward()
