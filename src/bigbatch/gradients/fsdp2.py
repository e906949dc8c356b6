"""Gradients under fully_shard (FSDP2, HSDP): hooks on the unsharded parameters."""

import math
import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bigbatch.errors import SettingError
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.gradient_hooks import gradient_hook, weak_method
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.protocols import OnGradient
from bigbatch.gradients.rank_reducer import GroupReducer, ShardIndices, indices_in_rows
from bigbatch.gradients.sharded import local_shard, require_one_mesh
from bigbatch.gradients.tapped_source import MADE_LATE, TappedSource

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
class FSDP2Source(TappedSource):
    """Sees the whole local gradient of every parameter before it is reduced and sharded.

    See [Note: FSDP2's shards].
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model.modules())
        self._units = units = _units(model)
        parameters = [parameter for owned in units.values() for _, _, parameter in owned]
        guard = GradGuard(grad_may_wait=True, local_grad=local_shard)
        reducer = FSDP2Reducer(require_one_mesh(parameters))
        super().__init__(parameters, UnshardedTap(units), guard, reducer)

    def zero_grad(self) -> None:
        """Sets every gradient to None, reshards the parameters and forgets the step."""
        super().zero_grad()
        reshard(self._units)


class UnshardedTap(GradientTap):
    """Leaf hooks on the parameters that FSDP2 gathers, as [Note: FSDP2's shards] has it.

    The last backward of a step has to reduce.
    """

    def __init__(self, units: dict[nn.Module, list[_Owned]]) -> None:
        super().__init__()
        self._units = units
        self._watched: set[Tensor] = set()
        self._report: OnGradient | None = None
        self._unsharded: dict[Tensor, weakref.ref[Tensor]] = {}  # where the leaf hooks are

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a parameter that is not sharded, or whose gradient is complex."""
        if not isinstance(parameter, DTensor):
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is whole, and the model "
                f"sharded: {MADE_LATE}; one that is not of the model belongs into a module "
                "that is sharded"
            )

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks the parameters that require a gradient, at the next forward that gathers them."""
        self._watched, self._report = set(parameters), report
        hook_unit = weak_method(self._hook_unit)
        for unit in self._units:
            if unit not in self._handles:
                self._handles[unit] = unit.register_forward_pre_hook(hook_unit)

    def detach(self, parameter: Tensor) -> None:
        """Removes the hook of one parameter."""
        super().detach(parameter)
        self._watched.discard(parameter)
        self._unsharded.pop(parameter, None)

    def parameter_of(self, leaf: Tensor) -> Tensor:
        """The sharded parameter of an unsharded one."""
        found = (p for p, unsharded in self._unsharded.items() if unsharded() is leaf)
        return next(found, leaf)

    def close(self) -> None:
        """Removes every hook."""
        super().close()
        self._unsharded.clear()

    def _hook_unit(self, unit: nn.Module, _: object) -> None:
        """Hooks each watched parameter of the unit that has no hook yet and is gathered."""
        assert self._report is not None
        for module, name, parameter in self._units[unit]:
            leaf = module._parameters[name]
            if leaf is None or isinstance(leaf, DTensor) or not leaf.requires_grad:
                continue
            hooked = self._unsharded.get(parameter)
            if parameter in self._watched and (hooked is None or hooked() is not leaf):
                hook = gradient_hook(self._report, parameter)
                self._handles[parameter] = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
                self._unsharded[parameter] = weakref.ref(leaf)


class FSDP2Reducer(GroupReducer):
    """Ranks of one device mesh. `.grad` is a DTensor, of which each rank has its local shard."""

    lockstep = True  # every forward and backward gathers parameters

    def __init__(self, parameter: DTensor) -> None:
        mesh = parameter.device_mesh
        rank = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
        super().__init__(rank, mesh.size(), [mesh.get_group(dim) for dim in range(mesh.ndim)])
        self.replicas = math.prod(
            size
            for size, placement in zip(mesh.shape, parameter.placements, strict=True)
            if isinstance(placement, Replicate)
        )

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's shard of a tensor shaped like the full gradient; nothing is sent."""
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a gradient this rank has."""
        assert isinstance(parameter, DTensor)
        mesh, shard = parameter.device_mesh, parameter.placements[-1]
        assert isinstance(shard, Shard)
        size = parameter.shape[shard.dim]
        rows = -(-size // mesh.size(mesh.ndim - 1))
        first = min(size, rows * mesh.get_local_rank(mesh.ndim - 1))
        return indices_in_rows(count, parameter.shape, shard.dim, first, min(rows, size - first))


def reshard(modules: Iterable[nn.Module]) -> None:
    """Puts the sharded parameters back into every FSDP module; nothing is sent."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: nn.Module) -> dict[nn.Module, list[_Owned]]:
    """The parameters that each FSDP module shards: its subtree's without nested FSDP modules."""
    units: dict[nn.Module, list[_Owned]] = {}
    visited: set[Tensor] = set()

    def visit(module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in visited:
                continue
            if unit is None or not isinstance(parameter, DTensor):
                raise SettingError(
                    f"parameter {name!r} of {type(module).__name__} is not sharded by fully_shard, "
                    "so no rank shares it; wrap the root module too"
                )
            visited.add(parameter)
            units.setdefault(unit, []).append((module, name, parameter))
        for child in module.children():
            visit(child, unit)

    visit(model, None)
    return units
