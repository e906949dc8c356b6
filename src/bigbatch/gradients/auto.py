"""The gradient source that fits a model: of its wrapper, or of plain tensors in one process."""

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import SettingError
from bigbatch.gradients.ddp import DDPSource
from bigbatch.gradients.pipeline import PipelineSource, PipelineStage, is_stage, whole_pipeline
from bigbatch.gradients.single_process import SingleProcessSource
from bigbatch.gradients.source import GradientSource

_UNSHARED = (
    "{ranks} ranks found, and a model that none of them shares; wrap it in "
    "DistributedDataParallel or fully_shard, and hand over the wrapped model"
)
NO_TENSOR_PARALLELISM = (
    "tensor parallelism cannot be measured in this release; leave parallelize_module out, and "
    "shard by fully_shard alone over all ranks"
)


def find_source(model: nn.Module | Iterable[Tensor] | Iterable[PipelineStage]) -> GradientSource:
    """The source of a model's gradients, by its wrapper; SettingError for others and several."""
    pipeline: dist.ProcessGroup | None = None
    if not isinstance(model, nn.Module):
        values: list[Any] = list(model)
        if not any(map(is_stage, values)):
            return SingleProcessSource(values, unshared=_UNSHARED)
        model, pipeline = whole_pipeline(values)
    modules = list(model.modules())
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise SettingError("FSDP1 flattens parameters; wrap the model by fully_shard (FSDP2)")
    bases = {base.__module__ for module in modules for base in type(module).__mro__}
    if any(name.startswith("torch.distributed._composable.replicate") for name in bases):
        raise SettingError(
            "replicate() of torch.distributed._composable cannot be measured: torch keeps it "
            "private; wrap the model in DistributedDataParallel, or by fully_shard"
        )
    if _is_fully_sharded(modules):
        from bigbatch.gradients.fsdp2 import FSDP2PipelineSource, FSDP2Source

        return FSDP2Source(model) if pipeline is None else FSDP2PipelineSource(model, pipeline)
    for parameter in model.parameters():
        if is_sharded(parameter) or hasattr(parameter, "_st_info"):
            raise SettingError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded over a mesh that "
                f"fully_shard has not made: {NO_TENSOR_PARALLELISM}"
            )
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if pipeline is not None:
        return PipelineSource(model, wrappers, pipeline)
    if len(wrappers) > 1:
        raise SettingError(f"{len(wrappers)} DDP wrappers found; measure each by its own meter")
    if wrappers:
        return DDPSource(wrappers[0], model.parameters())
    return SingleProcessSource(model.parameters(), unshared=_UNSHARED)


def parameters_of(model: nn.Module) -> list[Tensor]:
    """A model's parameters as optimizers train them: under fully_shard, resharded before."""
    if _is_fully_sharded(list(model.modules())):
        from bigbatch.gradients.fsdp2 import reshard

        reshard(model.modules())
    return list(model.parameters())


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor, which is not imported for models without any."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_fully_sharded(modules: list[nn.Module]) -> bool:
    """Whether a module is sharded by FSDP2, which is not imported for models without it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules)
