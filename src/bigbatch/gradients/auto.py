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
    "a variance-reduced optimizer compares whole gradients of micro-batches, and tensor "
    "parallelism (parallelize_module) leaves slices, copies and partial sums of them; use the base "
    "optimizer, or leave parallelize_module out"
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
        from bigbatch.gradients.fsdp2 import FSDP2PipelineSource, FSDP2Source, data_dims, reshard

        reshard(modules)
        sharded: list[Any] = list(filter(is_sharded, model.parameters()))
        is_cut = any(parameter.device_mesh.ndim > data_dims(parameter) for parameter in sharded)
        if pipeline is not None:
            _require_uncut(is_cut)
            return FSDP2PipelineSource(model, pipeline)
        if is_cut:
            from bigbatch.gradients.tensor_parallel import TensorParallelFSDP2Source

            return TensorParallelFSDP2Source(model)
        return FSDP2Source(model)
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    is_cut = any(is_sharded(p) or hasattr(p, "_st_info") for p in model.parameters())
    if pipeline is not None:
        _require_uncut(is_cut)
        return PipelineSource(model, wrappers, pipeline)
    if len(wrappers) > 1:
        raise SettingError(f"{len(wrappers)} DDP wrappers found; measure each by its own meter")
    ddp = wrappers[0] if wrappers else None
    if ddp is not None and any(is_sharded(value) for m in modules for value in vars(m).values()):
        raise SettingError(
            "the first forward of a model that parallelize_module cut takes the parameters out of "
            "it, under DDP; make the optimizer, and AdaptiveBatch or the GradientMeter, before it"
        )
    if is_cut:
        from bigbatch.gradients.tensor_parallel import tensor_parallel_source

        return tensor_parallel_source(model, ddp)
    if ddp is not None:
        return DDPSource(ddp, model.parameters())
    return SingleProcessSource(model.parameters(), unshared=_UNSHARED)


def _require_uncut(is_cut: bool) -> None:
    if is_cut:
        raise SettingError(
            "a stage of the pipeline is cut by parallelize_module, and a pipeline is measured "
            "without tensor parallelism in this release; leave one of them out"
        )


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
