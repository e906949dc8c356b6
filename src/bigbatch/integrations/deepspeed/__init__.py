"""SimiGrad as a plug-in to DeepSpeed: the engine of an unmodified release, specialised in place.

The module also has every name of DeepSpeed's own, so that a script changes its import alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import SettingError
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.optional_packages import import_optional
from bigbatch.policies.controller import Controller
from bigbatch.policies.lr_scaling import LRScaling
from bigbatch.policies.policy import Fixed, Policy
from bigbatch.setting_types import Count, checked
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import loop_options

deepspeed = import_optional("deepspeed", "deepspeed")

from bigbatch.integrations.deepspeed.adaptive_engine import AdaptiveEngine
from bigbatch.integrations.deepspeed.config_checks import require_no_options, require_one
from bigbatch.integrations.deepspeed.engine_parts import engine_meter, engine_scheduler
from bigbatch.integrations.deepspeed.simigrad_config import (
    AdaptiveBatchParams,
    set_fork_attributes,
    warn_of_number,
)
from bigbatch.integrations.deepspeed.vr_optimizer import require_base_optimizer

__all__ = ["AdaptiveEngine", "initialize"]


@checked
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | Iterable[Batch] | Batches | None = None,
    lr_scheduler: Any = None,
    *,
    adaptive_batch_params: Mapping[str, Any] | None = None,
    policy: Policy | Controller | None = None,
    lr_scaling: LRScaling = "sqrt",
    min_micro_batches: Count | None = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` with an adaptive batch size.

        engine, optimizer, loader, scheduler = initialize(
            model=model, model_parameters=model.parameters(), training_data=data, config=config,
            adaptive_batch_params={"enable_adjust": True, "similarity_target": 0.2},
        )
        for x, y in loader:                     # micro-batches of one pass
            loss = loss_fn(engine(x), y)        # the mean loss of a micro-batch
            engine.backward(loss)
            engine.step()

    Without `training_data` your loop makes the micro-batches: of
    `engine.train_micro_batch_size_per_gpu()` samples if `max_micro_batch_size` is set, else of the
    configured size; then only the accumulation changes. The scheduler is advanced once per
    configured batch of samples, and not once per update. With adaptation off the engine is
    DeepSpeed's own. This module also has all other names of DeepSpeed's (`init_distributed`,
    `zero.Init` ...).

    Args:
        args: as DeepSpeed's.
        model: as DeepSpeed's.
        optimizer: as DeepSpeed's.
        model_parameters: as DeepSpeed's.
        training_data: a data set, as DeepSpeed's; or a loader of this rank's batches, or
            `Batches` with options.
        lr_scheduler: as DeepSpeed's.
        adaptive_batch_params: the parameters of the paper's code; see `AdaptiveBatchParams`.
        policy: a policy in place of SimiGrad, without similarity_target; or a `Controller`, which
            has the initial batch size and the base batch.
        lr_scaling: as AdaptiveBatch's.
        min_micro_batches: as AdaptiveBatch's.
        **options: every and log, as AdaptiveBatch's; and all other arguments of DeepSpeed's:
            config, mpu, collate_fn ...
    Returns:
        (engine, optimizer, loader, lr_scheduler), as DeepSpeed's.
    Raises:
        SettingError: a parameter has a wrong type, or a DeepSpeed setting is not supported;
            docs/deepspeed.md.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021).
    """
    require_no_options(options)
    options.pop("transport", None)
    params = AdaptiveBatchParams.of(adaptive_batch_params)
    vr_optimizer = micro_batch_optimizer(optimizer)
    base = optimizer if vr_optimizer is None else vr_optimizer.base
    require_one(base)
    arguments = {"args": args, "model": model, "optimizer": base, "lr_scheduler": lr_scheduler}
    measuring: dict[str, Any] = {
        name: options.pop(name) for name in ("every", "log") if name in options
    }
    loop_options(**measuring)
    arguments |= {"model_parameters": model_parameters, **options}
    if policy is None and not params.enable_adjust and vr_optimizer is None:
        if measuring.get("log"):
            raise SettingError(
                "log= needs an adaptive engine, and this one is DeepSpeed's own; pass policy=, "
                "bigbatch.Fixed(batch_size) for a constant batch"
            )
        unchanged: tuple[Any, Any, Any, Any]
        unchanged = deepspeed.initialize(training_data=training_data, **arguments)
        require_base_optimizer(unchanged[0])
        if adaptive_batch_params is not None:
            set_fork_attributes(unchanged[0], params)
        return unchanged
    if policy is not None and params.enable_adjust:
        raise SettingError("policy= and enable_adjust both decide; pass one of them")
    engine, zero_optimizer, _, scheduler = deepspeed.initialize(**arguments)
    meter = engine_meter(engine, vr_optimizer)
    if engine.global_rank == 0:
        warn_of_number(adaptive_batch_params)
    batch_size = int(engine.train_batch_size())
    micro_batch = int(engine.train_micro_batch_size_per_gpu())
    own_loop = training_data is None
    loader = ExternalBatches(micro_batch) if own_loop else _loader(engine, training_data)
    stepped: Any = engine.basic_optimizer if vr_optimizer is None else optimizer
    if policy is None:
        policy = params.controller(batch_size) if params.enable_adjust else Fixed(batch_size)
    train = AdaptiveBatch(
        engine,
        stepped,
        loader,
        policy=policy,
        batch_size=None if isinstance(policy, Controller) else batch_size,
        micro_batch=params.max_micro_batch_size or micro_batch,
        fixed_micro_batch=own_loop and params.max_micro_batch_size is None,
        min_micro_batches=min_micro_batches,
        lr_scaling=lr_scaling,
        **measuring,
        scheduler=engine_scheduler(scheduler, engine.basic_optimizer),
        meter=meter,
    )
    AdaptiveEngine.adapt(engine, train, params)
    return engine, zero_optimizer, None if own_loop else EngineLoader(engine), scheduler


def __getattr__(name: str) -> Any:
    """All other names of DeepSpeed's module."""
    if not hasattr(deepspeed, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has deepspeed")
    return getattr(deepspeed, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(deepspeed)})


class EngineLoader:
    """Iterates over the planned micro-batches of an engine, one pass per iteration."""

    def __init__(self, engine: AdaptiveEngine) -> None:
        self._engine = engine

    def __iter__(self) -> Iterator[Batch]:
        return self._engine.batches()


def _loader(engine: Any, data: Any) -> Any:
    """A loader as DeepSpeed makes it of a data set; any other `training_data` as it is."""
    if isinstance(data, Batches) or (
        not isinstance(data, Dataset) and not hasattr(data, "__getitem__")
    ):
        return data
    loader = engine.deepspeed_io(data)
    return DataLoader(
        data,
        batch_size=loader.batch_size,
        sampler=loader.data_sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_local_io_workers,
        pin_memory=loader.pin_memory,
        drop_last=loader.dataloader_drop_last,
    )
