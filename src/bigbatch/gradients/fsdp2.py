"""Gradients under fully_shard (FSDP2, HSDP): hooks on the unsharded parameters."""

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import SettingError
from bigbatch.gradients.device_mesh import require_one_mesh
from bigbatch.gradients.distributed import DistributedSource
from bigbatch.gradients.gradient_hooks import gradient_hook, remove
from bigbatch.gradients.shard_indices import Held, held_in_rows
from bigbatch.gradients.sharded import local_grad
from bigbatch.gradients.single_process import MADE_LATE

_Owned = tuple[nn.Module, str, Tensor]  # a module, the name there, the sharded parameter


class FSDP2Source(DistributedSource):
    """Sees the whole local gradient of every parameter before it is reduced and sharded.

    A forward hook on each FSDP module, run when its parameters have just been gathered, puts a
    leaf hook on them, once: torch keeps the unsharded tensors. Works with several groups, mixed
    precision, checkpointing, and with or without `set_requires_gradient_sync(False)`; the last
    backward of a step has to reduce. `.grad` is a DTensor: its local piece is what counts here.

    After a forward without backward (an evaluation) modules hold whole parameters, a root module
    always does: they are resharded before parameters are listed, and at the end of each step, since
    FSDP2 does not gather again what it still holds from before the optimizer's step.
    """

    lockstep = True  # every forward and backward gathers parameters
    _grad_may_wait = True  # until the gradient is synchronized

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        units = _units(model)
        parameters = [parameter for owned in units.values() for _, _, parameter in owned]
        first = require_one_mesh(parameters)
        mesh = first.device_mesh
        self.ranks = mesh.size()
        self.rank = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
        self.replicas = math.prod(
            size
            for size, placement in zip(mesh.shape, first.placements, strict=True)
            if isinstance(placement, Replicate)
        )
        self._units = units
        self._unsharded: dict[Tensor, weakref.ref[Tensor]] = {}  # where the leaf hooks are
        self._forward_handles: dict[nn.Module, RemovableHandle] = {}
        weakref.finalize(self, remove, self._forward_handles)
        super().__init__(parameters, [mesh.get_group(dim) for dim in range(mesh.ndim)])

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watches more parameters, which have to be sharded.

        Raises:
            SettingError: one is whole, as an optimizer has it that was made after a forward.
        """
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
        """Empties the gradients, forgets the step, and gathers the new weights in the next one."""
        super().zero_grad()
        for unit in self._units:
            assert isinstance(unit, FSDPModule)
            unit.reshard()

    def _unhook(self) -> None:
        super()._unhook()
        self._unsharded.clear()
        remove(self._forward_handles)

    def _forget(self, parameter: Tensor) -> None:
        super()._forget(parameter)
        self._unsharded.pop(parameter, None)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor shaped like the whole gradient; nothing is sent."""
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()

    def held(self, parameter: Tensor, count: int) -> Held:
        """Which of the first `count` elements of a gradient this rank holds, cut by torch.chunk."""
        assert isinstance(parameter, DTensor)
        mesh, shard = parameter.device_mesh, parameter.placements[-1]
        assert isinstance(shard, Shard)
        size = parameter.shape[shard.dim]
        rows = -(-size // mesh.size(mesh.ndim - 1))
        first = min(size, rows * mesh.get_local_rank(mesh.ndim - 1))
        return held_in_rows(count, parameter.shape, shard.dim, first, min(rows, size - first))

    def _held(self, parameter: Tensor) -> Tensor | None:
        return local_grad(parameter)

    def _hook(self) -> None:
        if self._listens and not self._forward_handles:
            source = weakref.ref(self)

            def gathered(unit: nn.Module, *_: Any) -> None:
                watching = source()
                if watching is not None:
                    watching._hook_unit(unit)

            for unit in self._units:
                self._forward_handles[unit] = unit.register_forward_pre_hook(gathered)

    def _hook_unit(self, unit: nn.Module) -> None:
        """Puts a hook on each parameter of the unit that has none yet, and is whole."""
        for module, name, parameter in self._units[unit]:
            if parameter in self._others:
                continue
            leaf = module._parameters[name]
            if leaf is None or isinstance(leaf, DTensor) or not leaf.requires_grad:
                continue
            known = self._unsharded.get(parameter)
            if known is None or known() is not leaf:
                hook = gradient_hook(weakref.WeakMethod(self._gradient), weakref.ref(parameter))
                self._handles[parameter] = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
                self._unsharded[parameter] = weakref.ref(leaf)


def reshard(model: nn.Module) -> None:
    """Puts the sharded parameters back into every FSDP module; nothing is sent."""
    for module in model.modules():
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
