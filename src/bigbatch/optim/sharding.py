"""Sharded parameters: their gradient source, their local shards, and sums over their ranks.

See [Note: FSDP2's shards] in `gradients/fsdp2.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bigbatch.errors import SettingError
from bigbatch.gradients import MADE_LATE, GradientSource, SingleProcessSource
from bigbatch.gradients.auto import NO_TENSOR_PARALLELISM, is_sharded

AllReduce = Callable[[Tensor], None]

_UNSHARED = (
    "on {ranks} ranks does not know who shares the gradients, so weights would drift apart: under "
    "DDP call optimizer.attach(ddp_model) once; under fully_shard make the optimizer after it, and "
    "before any forward; a pipeline's stages cannot have one"
)


def source_of(parameters: Iterable[Tensor], optimizer: str) -> GradientSource:
    """The gradient source of an optimizer, for whole parameters or for shards of fully_shard."""
    parameters = list(parameters)
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if any(hasattr(parameter, "_st_info") for parameter in parameters):  # DTensors, in DDP
        raise SettingError(NO_TENSOR_PARALLELISM)
    if not sharded:
        return SingleProcessSource(parameters, unshared=f"{optimizer} {_UNSHARED}")
    from bigbatch.gradients.fsdp2 import ShardedSource, require_one_mesh

    if len(sharded) < len(parameters):
        raise SettingError(
            f"{len(sharded)} of {len(parameters)} parameters are sharded; wrap the root module by "
            f"fully_shard too. Where it is wrapped: {MADE_LATE}. Where parallelize_module has cut "
            f"them: {NO_TENSOR_PARALLELISM}"
        )
    require_one_mesh(sharded)
    return ShardedSource(parameters)


def local(tensor: Any) -> Tensor:
    """This rank's shard of a tensor."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def sharded_like(parameter: Any, shard: Tensor) -> Tensor:
    """A tensor sharded like a parameter, from this rank's shard of it."""
    if not is_sharded(parameter):
        return shard
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    tensor: Tensor = type(parameter).from_local(
        shard, mesh, placements, run_check=False, shape=shape, stride=parameter.stride()
    )
    return tensor


def all_reduce_of(parameters: list[Any]) -> AllReduce | None:
    """Sums values over the ranks that have shards of the parameters; None if they have none."""
    if set(map(type, parameters)) <= {Tensor, Parameter}:
        return None
    sharded = [is_sharded(parameter) for parameter in parameters]
    if not any(sharded):
        return None
    mesh = parameters[sharded.index(True)].device_mesh
    if not all(sharded) or any(parameter.device_mesh != mesh for parameter in parameters):
        raise SettingError(
            f"{sum(sharded)} of {len(parameters)} parameters are sharded, or not over one mesh; "
            "put the others into another group, or into another optimizer"
        )
    dims = [dim for dim, each in enumerate(parameters[0].placements) if each.is_shard()]
    groups = list(map(mesh.get_group, dims))

    def all_reduce(values: Tensor) -> None:
        for group in groups:
            dist.all_reduce(values, group=group)

    return all_reduce
