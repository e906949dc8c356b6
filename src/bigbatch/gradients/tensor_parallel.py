"""Gradients under tensor parallelism (parallelize_module): alone, under DDP, under fully_shard."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import SettingError
from bigbatch.gradients.ddp import DDPReducer, DDPSource
from bigbatch.gradients.fsdp2 import (
    FSDP2Reducer,
    FSDP2Source,
    data_dims,
    local_shard,
    require_not_offloaded,
)
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.gradient_hooks import hands_errors_over
from bigbatch.gradients.rank_reducer import GroupReducer
from bigbatch.gradients.source import GradientSource, MicroBatch


# [Note: Tensor parallelism]
# The processes of a tensor-parallel group compute one gradient together, so a rank, which has
# samples of its own, is such a group. Of a parameter that is cut each process has a slice of the
# gradient; of any other, plain or Replicate, a copy.
# - A slice is reported by its process, a copy by the first process of the group: the others report
#   no element of it. Sums over all processes count each element once, for norms, projections and
#   dot products alike. A partial sum (SequenceParallel's norms) is reduced before.
# - What every process of a group knows (samples, losses, counts) is added by the first one alone.
# - Samples are assigned to ranks. Settings and losses are compared between all processes: those of
#   a group must have the same samples, and copies of a gradient must be equal.
# - DDP replaces DTensors by their local tensors, which keep the placements in `_st_info`.
class TensorSlices:
    """The tensor-parallel group of this process, and the part of each gradient that it reports.

    Args:
        group: the processes that have slices of one model.
        data_dims: how many dimensions of a parameter's mesh fully_shard has added, the first ones.
    """

    def __init__(self, group: dist.ProcessGroup, data_dims: int = 0) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.place = dist.get_rank(group)
        self._data_dims = data_dims

    def placement(self, parameter: Any) -> Placement | None:
        """How the group has the parameter; None for a plain one, of which each process has all."""
        if isinstance(parameter, DTensor):
            placements: Sequence[Placement] = parameter.placements[self._data_dims :]
        else:
            placements = getattr(getattr(parameter, "_st_info", None), "placements", ())
        return placements[0] if placements else None

    def is_cut(self, parameter: Tensor) -> bool:
        """Whether each process of the group has a slice of the parameter."""
        return not isinstance(self.placement(parameter), Replicate | None)

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of `part`, before fully_shard shards it."""
        shape = list(parameter.shape)
        if not self.is_cut(parameter):
            return parameter.shape if self.place == 0 else torch.Size([0, *shape[1:]])
        if isinstance(parameter, DTensor):
            placement: Any = self.placement(parameter)
            size = shape[placement.dim]
            rows = -(-size // self.size)
            shape[placement.dim] = max(0, min(rows, size - rows * self.place))
        return torch.Size(shape)

    def part(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What this process reports of a gradient. Collective where that is a partial sum."""
        placement = self.placement(parameter)
        if isinstance(gradient, DTensor):
            if placement is not None and gradient.placements[-1] != placement:
                gradient = gradient.redistribute(placements=(*gradient.placements[:-1], placement))
            gradient = gradient.to_local()
        if hasattr(gradient, "wait"):  # for a collective that is under way
            gradient = gradient.wait()
        if self.place == 0 or self.is_cut(parameter):
            return gradient
        return gradient[:0] if gradient.ndim else gradient.reshape(1)[:0]


class _SlicesReducer(GroupReducer):
    """Reads the part of `.grad` that this process reports."""

    slices: TensorSlices

    def local_grad(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """The part of the reduced gradient."""
        return None if parameter.grad is None else self.slices.part(parameter, parameter.grad)

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of what this process reports of a gradient."""
        return self.slices.shape(parameter)


class TensorParallelReducer(_SlicesReducer):
    """The processes of one group, which are one rank."""

    def __init__(self, slices: TensorSlices) -> None:
        self.slices = slices
        super().__init__(0, 1, [], slices.group)


class TensorParallelDDPReducer(_SlicesReducer, DDPReducer):
    """DDP's ranks, each of which is a tensor-parallel group."""

    def __init__(self, ddp: DistributedDataParallel, slices: TensorSlices) -> None:
        self.slices = slices
        super().__init__(ddp, slices.group)


class TensorParallelFSDP2Reducer(_SlicesReducer, FSDP2Reducer):
    """The ranks of fully_shard, each of which is a tensor-parallel group."""

    def __init__(self, parameter: DTensor, slices: TensorSlices) -> None:
        self.slices = slices
        super().__init__(parameter, slices.group)


class _SlicesSource(GradientSource):
    """Reports this process's part of each gradient; see [Note: Tensor parallelism]."""

    reducer: _SlicesReducer
    keeps_sums = False

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._subscribers:
            gradient = self.reducer.slices.part(parameter, gradient)
        super()._on_gradient(parameter, gradient)

    def _sum_of(self, parameter: Tensor) -> Tensor | None:
        return None

    def cut_backwards(
        self, groups: int, layers: Mapping[Tensor, int], model: nn.Module | None = None
    ) -> None:
        """Raises SettingError: a process has slices of what the groups are computed from."""
        raise SettingError(
            f"groups={groups}: under tensor parallelism a process has slices of the activations "
            "that the gradients of groups are computed from; measure by micro-batches, groups=None"
        )

    def copied_grads(self) -> list[Tensor | None]:
        """`.grad` of each parameter that is not cut, which all processes of a group must share."""
        slices = self.reducer.slices
        return [self.guard.local_grad(p) for p in self.parameters if not slices.is_cut(p)]

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clips the gradients by their norm over all slices and shards; returns that."""
        parts = [part for part in map(self.local_grad, parameters) if part is not None]
        squares = torch.stack(torch._foreach_norm(parts)).square().sum() / self.reducer.replicas
        self.reducer.all_reduce(squares)
        norm = squares.sqrt()
        grads = [grad for grad in map(self.guard.local_grad, parameters) if grad is not None]
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class TensorParallelSource(_SlicesSource):
    """Tensor parallelism alone: `.grad` is this process's own."""

    float32_refusal = "tensor parallelism leaves partial sums, which autograd adds up as DTensors"

    def __init__(self, model: nn.Module, slices: TensorSlices) -> None:
        guard = GradGuard(local_grad=local_shard)
        super().__init__(model.parameters(), guard, TensorParallelReducer(slices))

    def _close(self, current: MicroBatch) -> None:
        """Ends a micro-batch; autograd has left partial sums, and copies of what is cut."""
        parameter: Any
        for parameter in self.parameters:
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        super()._close(current)


class TensorParallelDDPSource(_SlicesSource, DDPSource):
    """Tensor parallelism in DDP, over the data-parallel dimension of a mesh."""

    def __init__(self, ddp: DistributedDataParallel, slices: TensorSlices) -> None:
        super().__init__(ddp, ddp.parameters(), TensorParallelDDPReducer(ddp, slices))


class TensorParallelFSDP2Source(_SlicesSource, FSDP2Source):
    """Tensor parallelism under fully_shard, over the data-parallel dimension of a mesh."""

    def _find_reducer(
        self, parameters: Sequence[Any], pipeline: dist.ProcessGroup | None
    ) -> TensorParallelFSDP2Reducer:
        for parameter in parameters:
            require_not_offloaded(parameter)
        first, *others = [p for p in parameters if p.device_mesh.ndim > data_dims(p)]
        dims = data_dims(first)
        meshes = {_ranks_of(p.device_mesh, 0, data_dims(p)) for p in parameters}
        meshes |= {_ranks_of(p.device_mesh, dims, p.device_mesh.ndim) for p in (first, *others)}
        if len(meshes) > 2 or first.device_mesh.ndim > dims + 1:
            raise SettingError(
                "parameters are sharded over more meshes than one of data parallelism and one of "
                f"tensor parallelism, {first.device_mesh} among them (experts?); in this release "
                "they share these two"
            )
        return TensorParallelFSDP2Reducer(
            first, TensorSlices(first.device_mesh.get_group(dims), dims)
        )


def tensor_parallel_source(
    model: nn.Module, ddp: DistributedDataParallel | None
) -> TensorParallelSource | TensorParallelDDPSource:
    """The source of a model that parallelize_module cut, alone or in DDP.

    Raises:
        SettingError: the processes are not those of one tensor-parallel group for each rank.
    """
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    infos = [getattr(p, "_st_info", None) for p in model.parameters()]
    meshes += [info.mesh for info in infos if info is not None]
    groups = {_ranks_of(mesh, 0, mesh.ndim) for mesh in meshes}
    if len(groups) > 1 or meshes[0].ndim > 1:
        raise SettingError(
            f"parameters are cut over {len(groups)} meshes, {meshes[0]} among them (experts?); in "
            "this release tensor parallelism has one mesh of one dimension"
        )
    group = meshes[0].get_group()
    members, world = set(dist.get_process_group_ranks(group)), dist.get_world_size()
    if ddp is None:
        if len(members) < world:
            raise SettingError(
                f"parallelize_module cuts the model over {len(members)} of {world} ranks, and "
                "nothing shares it with the others; wrap it in DistributedDataParallel, with "
                'device_mesh=mesh["dp"], or by fully_shard, with mesh=mesh["dp"]'
            )
        return TensorParallelSource(model, TensorSlices(group))
    ranks = set(dist.get_process_group_ranks(ddp.process_group))
    if len(ranks & members) > 1:
        raise SettingError(
            f"DDP averages over ranks {sorted(ranks)}, and parallelize_module cuts the model over "
            f"{sorted(members)}, which have the same samples; pass DDP the other dimension of the "
            'mesh, device_mesh=mesh["dp"]'
        )
    return TensorParallelDDPSource(ddp, TensorSlices(group))


def _ranks_of(mesh: DeviceMesh, first: int, end: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of this process's groups along some dimensions of a mesh."""
    groups = map(mesh.get_group, range(first, end))
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
