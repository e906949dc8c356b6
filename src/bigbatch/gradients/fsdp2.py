"""Gradients under fully_shard (FSDP2, HSDP): of whole parameters, or reduced, of shards."""

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.auto import NO_TENSOR_PARALLELISM
from bigbatch.gradients.grad_guard import GradGuard, all_zero
from bigbatch.gradients.gradient_hooks import watching_hook, weak_method
from bigbatch.gradients.pipeline import MixedBackwards
from bigbatch.gradients.rank_reducer import GroupReducer, RankReducer, ShardIndices, indices_in_rows
from bigbatch.gradients.source import MADE_LATE, GradientSource

_Owned = tuple[nn.Module, str, Tensor]  # a module, the parameter's name in it, the parameter


# [Note: FSDP2's shards]
# A parameter under fully_shard is a DTensor of which each rank has a shard, and two tensors have
# gradients: the shard that the optimizer steps, and the whole parameter that a forward gathers.
# - Autograd's leaf is the whole one, so a rank's own gradient, before ranks are reduced, is seen by
#   a hook there alone. That tensor exists from the first forward on, and torch keeps it: a pre-hook
#   of the module, which runs when the parameters are gathered, hooks each once. So it works with
#   several groups, mixed precision, checkpointing, and without set_requires_gradient_sync.
# - `.grad` is a shard of the mean: |G|^2 is a sum over ranks, and a rank may have no element. The
#   shard is what torch.chunk cuts of dimension 0, so its indices are computed, and nothing is sent.
# - A forward without backward (an evaluation) leaves whole parameters in the modules, a root module
#   always does. They are no parameters to train: modules are resharded before parameters are
#   listed; and after each step, as FSDP2 gathers nothing that it still holds, from before the step.
# - An optimizer alone has the shards, no module. Their post-accumulate hooks see the sum over ranks
#   of each micro-batch (`ShardedSource`): k is the accumulation, and nothing is communicated.
class FSDP2Source(GradientSource):
    """Sees whole local gradients; the last backward of a step reduces. [Note: FSDP2's shards]."""

    on_leaves = False
    float32_refusal = (
        "fully_shard adds them up itself, in float32 under "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    )

    def __init__(self, model: nn.Module, pipeline: dist.ProcessGroup | None = None) -> None:
        reshard(model.modules())
        self._units = units = _units(model)
        self._whole: dict[Tensor, weakref.ref[Tensor]] = {}  # the leaf of each hooked parameter
        parameters = [parameter for owned in units.values() for _, _, parameter in owned]
        guard = GradGuard(grad_may_wait=True, local_grad=local_shard)
        super().__init__(parameters, guard, self._find_reducer(parameters, pipeline))

    def _find_reducer(
        self, parameters: Sequence[Tensor], pipeline: dist.ProcessGroup | None
    ) -> "FSDP2Reducer":
        return FSDP2Reducer(require_one_mesh(parameters), pipeline)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, all of them shards, between steps."""
        parameters = list(parameters)
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                raise SettingError(
                    f"a parameter of shape {tuple(parameter.shape)} is whole, and the model "
                    f"sharded: {MADE_LATE}; one that is not of the model belongs into a module "
                    "that is sharded"
                )
        super().add(parameters)

    def zero_grad(self) -> None:
        """Sets every gradient to None, reshards the parameters and forgets the step."""
        super().zero_grad()
        reshard(self._units)

    def _attach_hooks(self) -> None:
        hook_unit = weak_method(self._hook_unit)
        for unit in self._units if self._subscribers and not self._closed else ():
            if unit not in self._handles:
                self._handles[unit] = unit.register_forward_pre_hook(hook_unit)

    def _hook_unit(self, unit: nn.Module, _: object) -> None:
        """Hooks each watched parameter of the unit that has no hook yet and is gathered."""
        for module, name, parameter in self._units[unit]:
            leaf = module._parameters[name]
            if leaf is None or _is_shard_of(leaf, parameter) or not leaf.requires_grad:
                continue
            is_hooked = parameter in self._handles and self._whole[parameter]() is leaf
            if parameter not in self._unwatched and not is_hooked:
                self._handles[parameter] = self._register(leaf, parameter)
                self._whole[parameter] = weakref.ref(leaf)

    def _watched(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        hooked = {id(leaf()): p for p, leaf in self._whole.items() if p in self._handles}
        return [hooked.get(id(leaf)) for leaf in leaves]


class FSDP2PipelineSource(MixedBackwards, FSDP2Source):
    """The stages of a rank, each under fully_shard over other ranks."""


class ShardedSource(GradientSource):
    """Watches the local shards of `.grad`; see [Note: FSDP2's shards].

    An engine that reduces in every backward leaves the sum so far, S_j, in the shard. What the
    micro-batch of all ranks together added is S_j - S_{j-1}, for one copy of the shard. A backward
    whose gradient is not reduced is not seen.
    """

    guard: "ShardGuard"
    on_leaves, keeps_sums = False, True

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._sums: dict[Tensor, Tensor] = {}  # S_{j-1}, in buffers that nobody else writes to
        super().__init__(parameters, ShardGuard(), RankReducer(reduces_each_backward=True))

    def _register(self, leaf: Tensor, parameter: Tensor) -> RemovableHandle:
        hook = watching_hook(weak_method(self._on_accumulation))
        return leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    def _on_accumulation(self, parameter: Tensor) -> None:
        shard = local_shard(parameter)
        assert shard is not None
        self.guard.arriving = parameter
        self._on_gradient(parameter, shard)
        self.guard.arriving = None

    def _watch_backward(self) -> None:
        try:
            super()._watch_backward()
        except RuntimeError as error:  # no backward runs
            raise GradientError(
                "gradients were reduced outside a backward, as by the schedule of a pipeline, once "
                "for all its micro-batches; a pipeline's stages cannot have a variance-reduced "
                "optimizer"
            ) from error

    def _begin_step(self) -> None:
        self._sums.clear()
        super()._begin_step()

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        total = self._sums.get(parameter)
        super()._emit(parameter, gradient if total is None else gradient - total)
        if total is None:
            self._sums[parameter] = gradient.clone()
        else:
            total.copy_(gradient)

    def _sum_of(self, parameter: Tensor) -> Tensor | None:
        return self._sums.get(parameter)


class ShardGuard(GradGuard):
    """Watches shards; autograd.grad runs no hook on them, so each backward that is seen counts."""

    def __init__(self) -> None:
        super().__init__(grad_may_wait=True, local_grad=local_shard)
        self.arriving: Tensor | None = None  # the parameter whose hook runs

    def is_clean(self) -> bool:
        """Whether the other shards are empty; the arriving one holds the gradient already."""
        other_parameters = [p for p in self.parameters if p is not self.arriving]
        return all_zero(grad for p in other_parameters if (grad := local_shard(p)) is not None)

    def is_clean_within_step(self) -> bool:
        """Whether gradients were set to None; zeros may be one rank's. Two writes are refused."""
        for last, now in zip(self._stamps, self.stamps_before, strict=True):
            if last and (now is None or now[0] != last[0]):
                return True
            if last and now and now[1] - last[1] > 1:
                raise GradientError(
                    ".grad was written to between two backwards of a step; where a step was "
                    "left out, call optimizer.zero_grad(), or zero_grad(set_to_none=True)"
                )
        return False


class FSDP2Reducer(GroupReducer):
    """Ranks of one device mesh. `.grad` is a DTensor, of which each rank has its local shard."""

    lockstep = True  # every forward and backward gathers parameters

    def __init__(self, parameter: DTensor, rank_group: dist.ProcessGroup | None = None) -> None:
        mesh, self._dims = parameter.device_mesh, data_dims(parameter)
        size = math.prod(mesh.shape[self._dims :])  # of tensor parallelism
        place = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
        groups = [mesh.get_group(dim) for dim in range(self._dims)]
        super().__init__(place // size, mesh.size() // size, groups, rank_group)
        self.replicas = math.prod(mesh.shape[: self._dims - 1])

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's shard of a tensor shaped like the full gradient; nothing is sent."""
        return full.narrow(*self._rows(parameter, full.shape))

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a gradient this rank has."""
        shape = self.shape(parameter)
        return indices_in_rows(count, shape, *self._rows(parameter, shape))

    def _rows(self, parameter: Tensor, shape: Sequence[int]) -> tuple[int, int, int]:
        """The dimension of a gradient that is sharded, this rank's first row of it, how many."""
        assert isinstance(parameter, DTensor)
        mesh, last = parameter.device_mesh, self._dims - 1
        shard: Any = parameter.placements[last]
        size = shape[shard.dim]
        rows = -(-size // mesh.size(last))
        first = min(size, rows * mesh.get_local_rank(last))
        return shard.dim, first, min(rows, size - first)


def data_dims(parameter: DTensor) -> int:
    """How many dimensions of its mesh fully_shard has added, (Replicate,) Shard; the first ones."""
    copies = itertools.takewhile(Placement.is_replicate, parameter.placements)
    return len(list(copies)) + 1


def _is_shard_of(leaf: Tensor, parameter: Tensor) -> bool:
    """Whether a module has the shard still, and not what a forward gathers."""
    assert isinstance(parameter, DTensor)
    return isinstance(leaf, DTensor) and leaf.device_mesh == parameter.device_mesh


def local_shard(parameter: Tensor) -> Tensor | None:
    """This rank's shard of `.grad`, whether that is a DTensor or plain."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def require_one_mesh(parameters: Sequence[Tensor]) -> DTensor:
    """The first parameter, whose mesh all must have; raises SettingError if they do not."""
    first = parameters[0]
    assert isinstance(first, DTensor)
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh != first.device_mesh:
            raise SettingError(
                f"parameters are sharded over two meshes, {first.device_mesh} and "
                f"{parameter.device_mesh} (experts?); in this release they share one"
            )
        require_not_offloaded(parameter)
        *copies, shard = [isinstance(p, Replicate) for p in parameter.placements]
        if shard or not all(copies) or len(copies) > 1:
            raise SettingError(
                f"a parameter has the placements {parameter.placements}, where fully_shard alone "
                "gives (Shard,) or (Replicate, Shard); for replicate(), wrap the model in "
                f"DistributedDataParallel; {NO_TENSOR_PARALLELISM}"
            )
    return first


def require_not_offloaded(parameter: DTensor) -> None:
    """Raises SettingError for a parameter that is away from the devices of its mesh."""
    if parameter.device.type == "cpu" != parameter.device_mesh.device_type:
        raise SettingError(
            "parameters are offloaded to the CPU (CPUOffloadPolicy), away from the ranks' "
            f"{parameter.device_mesh.device_type}; that cannot be measured in this release"
        )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Puts the sharded parameters back into every FSDP module; nothing is sent."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: nn.Module) -> dict[nn.Module, list[_Owned]]:
    """The parameters that each FSDP module shards: its subtree's without nested FSDP modules."""
    outer_first = [module for module in model.modules() if isinstance(module, FSDPModule)]
    unit_of = {module: unit for unit in outer_first for module in unit.modules()}
    units: dict[nn.Module, list[_Owned]] = {}
    visited: set[Tensor] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in visited:
                continue
            if module not in unit_of or not isinstance(parameter, DTensor):
                raise SettingError(
                    f"parameter {name!r} of {type(module).__name__} is not sharded by fully_shard, "
                    "so no rank shares it; wrap the root module too"
                )
            visited.add(parameter)
            units.setdefault(unit_of[module], []).append((module, name, parameter))
    return units
