"""SimiGrad as a plug-in to DeepSpeed: the unmodified release's engine, specialised in place.

Also everything that DeepSpeed's own module has, for scripts that call it by one name.
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
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.optional_packages import import_optional
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan_constraints import Least
from bigbatch.policies.policy import Fixed, Policy
from bigbatch.setting_types import checked
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.lr_scaling import LRScaling

deepspeed = import_optional("deepspeed", "deepspeed")

from bigbatch.integrations.deepspeed.adaptive_engine import AdaptiveEngine
from bigbatch.integrations.deepspeed.config_checks import require_supported
from bigbatch.integrations.deepspeed.gradient_source import ZeroSource
from bigbatch.integrations.deepspeed.lr_schedulers import advanceable
from bigbatch.integrations.deepspeed.paper_names import put_on
from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams, warn_of_number
from bigbatch.integrations.deepspeed.vr_optimizer import (
    bind_to_zero,
    require_not_made,
    tell_layers,
    vr_layout_of,
)
from bigbatch.integrations.deepspeed.zero_layout import layout_of

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
    min_micro_batches: Least | None = None,
    **more: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, and the batch adapts.

        engine, optimizer, loader, scheduler = initialize(
            model=model, model_parameters=model.parameters(), training_data=data, config=config,
            adaptive_batch_params={"enable_adjust": True, "similarity_target": 0.2},
        )
        for x, y in loader:                     # this pass's micro-batches
            loss = loss_fn(engine(x), y)        # the mean loss of one
            engine.backward(loss)
            engine.step()

    Without `training_data` the loop's own micro-batches are taken, of
    `engine.train_micro_batch_size_per_gpu()` samples where `max_micro_batch_size` is given, else of
    the configured size; then the accumulation alone changes. The scheduler is advanced once per
    configured batch of samples, and not once per update. With adaptation off the engine is
    DeepSpeed's own. Whatever else DeepSpeed has (`init_distributed`, `zero.Init` ...) this module
    has too.

    Args:
        args: as DeepSpeed's.
        model: as DeepSpeed's.
        optimizer: as DeepSpeed's.
        model_parameters: as DeepSpeed's.
        training_data: a data set, as DeepSpeed's; or a loader of this rank's batches, or
            `Batches` with options of its own.
        lr_scheduler: as DeepSpeed's.
        adaptive_batch_params: as the paper's code took them; see `AdaptiveBatchParams`.
        policy: another policy than SimiGrad's; then similarity_target is left out. Or a
            `Controller` with options of its own, which has the starting size and the base batch.
        lr_scaling: as AdaptiveBatch's.
        min_micro_batches: as AdaptiveBatch's.
        **more: whatever else DeepSpeed takes: config, mpu, collate_fn ...
    Returns:
        (engine, optimizer, loader, lr_scheduler), as DeepSpeed's.
    Raises:
        SettingError: parameters of another type, or a setting of DeepSpeed with which it would not
            be right; docs/deepspeed.md.
    Source:
        SimiGrad (Qin et al., NeurIPS 2021).
    """
    params = AdaptiveBatchParams.of(adaptive_batch_params)
    reduced = optimizer if isinstance(optimizer, VarianceReduced) else None
    base = optimizer if reduced is None else reduced.base
    given = {"args": args, "model": model, "optimizer": base, "lr_scheduler": lr_scheduler}
    given |= {"model_parameters": model_parameters, **more}
    if policy is None and not params.enable_adjust and reduced is None:
        plain: tuple[Any, Any, Any, Any]
        plain = deepspeed.initialize(training_data=training_data, **given)
        require_not_made(plain[0])
        if adaptive_batch_params is not None:
            put_on(plain[0], params)
        return plain
    if policy is not None and params.enable_adjust:
        raise SettingError("policy= and enable_adjust both decide; pass one of them")
    engine, wrapped, _, scheduler = deepspeed.initialize(**given)
    require_supported(engine)
    require_not_made(engine)
    if engine.global_rank == 0:
        warn_of_number(adaptive_batch_params)
    source, batch = _source(engine, reduced), int(engine.train_batch_size())
    own_micro, micro = int(engine.train_micro_batch_size_per_gpu()), params.max_micro_batch_size
    announces = training_data is None
    loader = ExternalBatches(own_micro) if announces else _loader(engine, training_data)
    train = AdaptiveBatch(
        engine,
        reduced or engine.basic_optimizer,
        loader,
        policy=policy or (params.policy() if params.enable_adjust else Fixed(batch)),
        batch_size=None if isinstance(policy, Controller) else batch,
        micro_batch=micro or own_micro,
        fixed_micro_batch=announces and micro is None,
        min_micro_batches=min_micro_batches,
        lr_scaling=lr_scaling,
        scheduler=advanceable(scheduler, engine.basic_optimizer),
        meter=GradientMeter(engine, source=source),
    )
    AdaptiveEngine.adapt(engine, train, params)
    return engine, wrapped, None if announces else EngineLoader(engine), scheduler


def __getattr__(name: str) -> Any:
    """Whatever else DeepSpeed has, so that a script changes its import alone."""
    if not hasattr(deepspeed, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has deepspeed")
    return getattr(deepspeed, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(deepspeed)})


class EngineLoader:
    """Gives an engine its micro-batches, as they are planned; one pass an iteration."""

    def __init__(self, engine: AdaptiveEngine) -> None:
        self._engine = engine

    def __iter__(self) -> Iterator[Batch]:
        return self._engine.batches()


def _source(engine: Any, reduced: VarianceReduced | None) -> ZeroSource:
    """Of the engine's gradients; its optimizers learn where ZeRO has laid them."""
    layout = layout_of(engine)
    source = ZeroSource(engine, layout)
    tell_layers(engine.basic_optimizer, layout)
    if reduced is not None:
        bind_to_zero(reduced, source, vr_layout_of(engine, reduced, layout))
    return source


def _loader(engine: Any, data: Any) -> Any:
    """A loader as DeepSpeed makes it of a data set; or the given one."""
    if isinstance(data, Batches) or (
        not isinstance(data, Dataset) and not hasattr(data, "__getitem__")
    ):
        return data
    made = engine.deepspeed_io(data)
    return DataLoader(
        data,
        batch_size=made.batch_size,
        sampler=made.data_sampler,
        collate_fn=made.collate_fn,
        num_workers=made.num_local_io_workers,
        pin_memory=made.pin_memory,
        drop_last=made.dataloader_drop_last,
    )
