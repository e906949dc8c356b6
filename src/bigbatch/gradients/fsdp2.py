"""Gradients under fully_shard (FSDP2, HSDP): hooks on the unsharded parameters."""

import math
import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import SettingError
from bigbatch.gradients.device_mesh import require_one_mesh
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.gradient_hooks import gradient_hook, remove, weakly
from bigbatch.gradients.leaf_tap import HookTap
from bigbatch.gradients.protocols import OnGradient
from bigbatch.gradients.rank_reducer import GroupReducer
from bigbatch.gradients.shard_indices import ShardIndices, indices_in_rows
from bigbatch.gradients.sharded import local_grad
from bigbatch.gradients.source import MADE_LATE, GradientSource

_Owned = tuple[nn.Module, str, Tensor]  # a module, the name there, the sharded parameter


class FSDP2Source(GradientSource):
    """Sees the whole local gradient of every parameter before it is reduced and sharded.

    After a forward without backward (an evaluation) modules hold whole parameters, a root module
    always does: they are resharded before parameters are listed, and at the end of each step, since
    FSDP2 does not gather again what it still holds from before the optimizer's step.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        units = _units(model)
        parameters = [parameter for owned in units.values() for _, _, parameter in owned]
        guard = GradGuard(engine_writes=True, grad_may_wait=True, local=local_grad)
        super().__init__(
            parameters,
            UnshardedTap(units),
            guard,
            FSDP2Reducer(require_one_mesh(parameters)),
            on_zero_grad=lambda: reshard_units(units),
        )


class UnshardedTap(HookTap):
    """Leaf hooks on the parameters that FSDP2 gathers.

    A forward hook on each FSDP module, run when its parameters have just been gathered, hooks them
    once: torch keeps the unsharded tensors. Works with several groups, mixed precision,
    checkpointing, and with or without `set_requires_gradient_sync(False)`; the last backward of a
    step has to reduce.

    Args:
        units: what each FSDP module shards.
    """

    on_leaves = False

    def __init__(self, units: dict[nn.Module, list[_Owned]]) -> None:
        super().__init__()
        self._units = units
        self._watched: set[Tensor] = set()
        self._report: OnGradient | None = None
        self._unsharded: dict[Tensor, weakref.ref[Tensor]] = {}  # where the leaf hooks are
        self._forward_handles: dict[nn.Module, RemovableHandle] = {}
        weakref.finalize(self, remove, self._forward_handles)

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a whole one, as an optimizer has it that is made too late."""
        if not isinstance(parameter, DTensor):
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is whole, and the model "
                f"sharded: {MADE_LATE}; one that is not of the model belongs into a module "
                "that is sharded"
            )
        super().require_supported(parameter)

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks those that require a gradient, at the next forward that gathers them."""
        self._watched, self._report = set(parameters), report
        gathered = weakly(self._hook_unit)
        for unit in self._units if not self._forward_handles else ():
            self._forward_handles[unit] = unit.register_forward_pre_hook(
                lambda unit, _: gathered(unit)
            )

    def detach(self, parameter: Tensor) -> None:
        """Removes the hook of one parameter."""
        super().detach(parameter)
        self._watched.discard(parameter)
        self._unsharded.pop(parameter, None)

    def close(self) -> None:
        """Removes every hook."""
        super().close()
        self._unsharded.clear()
        remove(self._forward_handles)

    def _hook_unit(self, unit: nn.Module) -> None:
        """Hooks each parameter of the unit that is watched, has no hook yet, and is whole."""
        assert self._report is not None
        for module, name, parameter in self._units[unit]:
            leaf = module._parameters[name]
            if leaf is None or isinstance(leaf, DTensor) or not leaf.requires_grad:
                continue
            if parameter not in self._watched:
                continue
            hooked = self._unsharded.get(parameter)
            if hooked is None or hooked() is not leaf:
                hook = gradient_hook(self._report, weakref.ref(parameter))
                self._handles[parameter] = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
                self._unsharded[parameter] = weakref.ref(leaf)


class FSDP2Reducer(GroupReducer):
    """Ranks of one device mesh. `.grad` is a DTensor, of which each rank has its local shard.

    Args:
        first: any of the parameters, for the mesh and placements of all.
    """

    lockstep = True  # every forward and backward gathers parameters

    def __init__(self, first: DTensor) -> None:
        mesh = first.device_mesh
        rank = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
        super().__init__(rank, mesh.size(), [mesh.get_group(dim) for dim in range(mesh.ndim)])
        self._replicas = math.prod(
            size
            for size, placement in zip(mesh.shape, first.placements, strict=True)
            if isinstance(placement, Replicate)
        )

    @property
    def replicas(self) -> int:
        """How many ranks have the same shard."""
        return self._replicas

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor shaped like the whole gradient; nothing is sent."""
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a gradient this rank has, cut by torch.chunk."""
        assert isinstance(parameter, DTensor)
        mesh, shard = parameter.device_mesh, parameter.placements[-1]
        assert isinstance(shard, Shard)
        size = parameter.shape[shard.dim]
        rows = -(-size // mesh.size(mesh.ndim - 1))
        first = min(size, rows * mesh.get_local_rank(mesh.ndim - 1))
        return indices_in_rows(count, parameter.shape, shard.dim, first, min(rows, size - first))


def reshard(model: nn.Module) -> None:
    """Puts the sharded parameters back into every FSDP module; nothing is sent."""
    reshard_units(model.modules())


def reshard_units(modules: Iterable[nn.Module]) -> None:
    """The same for some modules."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(model: nn.Module) -> dict[nn.Module, list[_Owned]]:
    """For each FSDP module what it shards: parameters of its subtree, less nested FSDP modules."""
    units: dict[nn.Module, list[_Owned]] = {}
    seen: set[Tensor] = set()

    def visit(module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in seen:
                continue
            if unit is None or not isinstance(parameter, DTensor):
                raise SettingError(
                    f"parameter {name!r} of {type(module).__name__} is not sharded by fully_shard, "
                    "so no rank shares it; wrap the root module too"
                )
            seen.add(parameter)
            units.setdefault(unit, []).append((module, name, parameter))
        for child in module.children():
            visit(child, unit)

    visit(model, None)
    return units
