"""Checks of device meshes: only those that fully_shard alone makes can be measured."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from bigbatch.errors import SettingError

_REMEDY = (
    "tensor parallelism cannot be measured in this release; leave parallelize_module out, and "
    "shard by fully_shard alone over all ranks"
)


def require_no_tensor_parallelism(parameters: Iterable[Tensor]) -> None:
    """Checks that parameters outside `fully_shard` are not sharded.

    Raises:
        SettingError: a parameter is a shard of a tensor-parallel mesh, also as DDP holds it.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor) or hasattr(parameter, "_st_info"):
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over a mesh that "
                f"fully_shard has not made: {_REMEDY}"
            )


def require_one_mesh(parameters: Sequence[Tensor]) -> DTensor:
    """The first parameter, for the mesh and placements of all.

    Raises:
        SettingError: there are two meshes, offloaded parameters, or other placements.
    """
    first = parameters[0]
    assert isinstance(first, DTensor)
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh != first.device_mesh:
            raise SettingError(
                f"parameters are sharded over two meshes, {first.device_mesh} and "
                f"{parameter.device_mesh} (experts?); in this release they share one"
            )
        if parameter.device.type == "cpu" != parameter.device_mesh.device_type:
            raise SettingError(
                "parameters are offloaded to the CPU (CPUOffloadPolicy), away from the ranks' "
                f"{first.device_mesh.device_type}; that cannot be measured in this release"
            )
        *copies, shard = [isinstance(p, Replicate) for p in parameter.placements]
        if shard or not all(copies) or len(copies) > 1:
            raise SettingError(
                f"a parameter has the placements {parameter.placements}, where fully_shard alone "
                f"gives (Shard,) or (Replicate, Shard): {_REMEDY}; for replicate(), wrap the model "
                "in DistributedDataParallel"
            )
    return first
