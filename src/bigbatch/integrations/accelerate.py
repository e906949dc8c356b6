"""AdaptiveBatch for a model, optimizer and loader prepared by Hugging Face's accelerate."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.micro_batches import MicroBatch, StepBatches
from bigbatch.data.rank_consistency import samples_of_rank
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.data.token_steps import TokenStep
from bigbatch.errors import SettingError
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.optional_packages import import_optional
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions

accelerate = import_optional("accelerate", "accelerate")

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SkipBatchSampler,
)
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    DistributedType,
    broadcast_object_list,
    send_to_device,
    synchronize_rng_states,
)
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

_REPLACED = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_LOADER_OPTIONS = inspect.signature(DataLoader).parameters.keys() - _REPLACED


def adaptive_batch(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Iterable[Batch] | Batches,
    *,
    policy: Policy | Controller,
    scheduler: Any = None,
    meter: GradientMeter | None = None,
    **options: Unpack[LoopOptions],
) -> AdaptiveBatch:
    """An AdaptiveBatch of what `accelerator.prepare` returned, on any number of processes.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        train = adaptive_batch(accelerator, model, optimizer, loader, policy=bb.SimiGrad(0.2))
        for epoch in train.epochs(10):
            for step in train:
                for x, y in step:
                    step.backward(loss_fn(model(x), y))  # not accelerator.backward
                record = step.update()  # not optimizer.step, scheduler.step, zero_grad

    Every sample comes once per epoch, assigned to the processes in turn: accelerate's repeated
    samples, which give all processes equally many batches, are left out. The loader's batch size
    stays that of one process. The scheduler is advanced over the samples as accelerate advances it:
    once for each batch of the loader before `prepare`, so `num_training_steps=len(loader) * epochs`
    of that loader ends with the training at any batch size. A GradScaler is accelerate's own.

    Args:
        accelerator: an Accelerator with `gradient_accumulation_steps=1`.
        model: the prepared model.
        optimizer: the prepared optimizer.
        loader: the prepared loader, or `batches(accelerator, loader, ...)` with options.
        policy: as for `AdaptiveBatch`.
        scheduler: the prepared scheduler, a function as for `AdaptiveBatch`, or None; or a list
            with one of them for each optimizer of a `Composite`, all prepared or all functions.
        meter: as for `AdaptiveBatch`.
        options: as for `AdaptiveBatch`.
    Raises:
        SettingError: a setting of accelerate is not supported; the message has the remedy.
    """
    require_supported(accelerator, options)
    is_list = isinstance(scheduler, list | tuple)
    schedulers = [*scheduler] if is_list else [scheduler]
    is_prepared = all(isinstance(each, AcceleratedScheduler) for each in schedulers)
    is_around = _is_around_engines(optimizer, model)
    others = [each for each in schedulers if each is not None and not callable(each)]
    if others and any(map(callable, schedulers)):
        raise SettingError(
            "scheduler= has both schedulers and functions, which count different ticks; prepare a "
            "LambdaLR of each function, or pass functions alone"
        )
    for name, value, is_right in (
        ("optimizer", optimizer, isinstance(optimizer, AcceleratedOptimizer) or is_around),
        ("scheduler", others[0] if others else None, is_prepared or not others),
    ):
        if not is_right:
            raise SettingError(
                f"{name}= is a {type(value).__name__} that accelerate did not prepare; pass what "
                "accelerator.prepare returns for it"
            )
    inner = torch_optimizer(optimizer)
    own = [torch_scheduler(each, inner) for each in schedulers]
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if meter is not None:
            raise SettingError(
                "meter= is given, and on DeepSpeed the engine's own is used; leave meter= out"
            )
        meter = prepared_meter(accelerator, model, inner)
    train = AdaptiveBatch(
        model,
        inner,
        loader if isinstance(loader, Batches) else batches(accelerator, loader),
        policy=policy,
        scheduler=own if is_list else own[0],
        scaler=accelerator.scaler,
        meter=meter,
        **options,
    )
    if is_prepared:
        train.scheduler_batch = _scheduler_batch(accelerator, schedulers[0], train)
    return train


def prepared_meter(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer,
    make: Callable[..., GradientMeter] | None = None,
) -> GradientMeter:
    """The meter of a prepared model; that of a DeepSpeed engine is made with source= too."""
    make = make or GradientMeter
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return make(model)
    from bigbatch.integrations.deepspeed.engine_parts import engine_meter

    return engine_meter(model, optimizer, make)


def _is_around_engines(optimizer: Any, model: Any) -> bool:
    """Whether a variance-reduced optimizer has that of a DeepSpeed engine inside."""
    vr_optimizer = micro_batch_optimizer(optimizer)
    own = getattr(model, "basic_optimizer", None)
    return vr_optimizer is not None and vr_optimizer.base is own


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer inside one that accelerate has prepared, also where ZeRO is around it."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    is_zero = isinstance(optimizer, DeepSpeedOptimizerWrapper) and not isinstance(inner, Optimizer)
    return inner.optimizer if is_zero else inner


def torch_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """The scheduler inside one that accelerate has prepared, also where it is DeepSpeed's."""
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    if not isinstance(scheduler, DeepSpeedSchedulerWrapper):
        return inner
    from bigbatch.integrations.deepspeed.engine_parts import engine_scheduler

    return engine_scheduler(inner, optimizer)


def _scheduler_batch(accelerator: Any, scheduler: Any, train: AdaptiveBatch) -> float:
    """Number of samples for which accelerate advances a scheduler once.

    In accelerate's own loop an update takes one batch of the loader on every process, and advances
    the scheduler once per process; once in all if it splits batches, the script steps it, or
    DeepSpeed does.
    """
    ranks, size = accelerator.num_processes, train.batches.batch_size
    steps_once = accelerator.split_batches or not accelerator.step_scheduler_with_optimizer
    steps_once |= isinstance(scheduler, DeepSpeedSchedulerWrapper)
    if size is None:
        return train.controller.base_batch / (1 if steps_once else ranks)
    return size * ranks if steps_once else size


def require_supported(accelerator: Any, options: Mapping[str, Any]) -> None:
    """Raises SettingError for settings of the accelerator that AdaptiveBatch does not support."""
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise SettingError(
            f"gradient_accumulation_steps={steps}: accumulation follows from the batch size and "
            "micro_batch here; leave it at 1 in Accelerator"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "DEEPSPEED":
        from bigbatch.integrations.deepspeed.config_checks import require_no_options

        require_no_options(options)
    if kind in ("MEGATRON_LM", "XLA"):
        raise SettingError(
            f"distributed_type={kind} is not supported; DDP, FSDP2 and DeepSpeed are"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise SettingError(
            "FSDP1 flattens parameters; pass FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise SettingError(
            f"parallelism_config has {parallel.non_data_parallel_size} ranks that share samples; "
            "tensor, context and sequence parallelism are not supported: use data parallelism alone"
        )


class ShardedSampler(Sampler[Any]):
    """Selects the samples of one rank from a sampler whose order is the same on all ranks.

    Rank r has the samples at r, r + W, r + 2 W ..., as in `ElasticDistributedSampler`.

    Args:
        sampler: the sampler of the whole data set.
        rank: the rank r that iterates over the samples.
        ranks: number of ranks W.
        multiple: samples beyond the last multiple of this number are left out.
    Example:
        >>> [list(ShardedSampler(range(10, 15), rank=rank, ranks=2)) for rank in (0, 1)]
        [[10, 12, 14], [11, 13]]
    """

    def __init__(self, sampler: Any, rank: int, ranks: int, multiple: int = 1) -> None:
        self.sampler = sampler
        self.rank, self.ranks = rank, ranks
        self.total = len(sampler) - len(sampler) % multiple  # over all ranks

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the order; None where the epoch alone determines the order."""
        seeds_epochs = hasattr(self.sampler, "initial_seed")  # accelerate's SeedableRandomSampler
        return None if seeds_epochs else getattr(self.sampler, "generator", None)

    @property
    def initial_seed(self) -> int | None:
        """The seed to which the epoch is added; None where a generator determines the order."""
        return getattr(self.sampler, "initial_seed", None)

    @initial_seed.setter
    def initial_seed(self, seed: int) -> None:
        self.sampler.initial_seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the sampler, if it has one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return samples_of_rank(self.total, self.rank, self.ranks)

    def __iter__(self) -> Iterator[Any]:
        local = (
            sample
            for position, sample in enumerate(self.sampler)
            if position < self.total and position % self.ranks == self.rank
        )
        # Reads one sample ahead, so that a generator has drawn the whole pass before a rank yields
        # its last sample: ranks with unequal passes then start the next from the same state.
        for sample, _ in pairwise(chain(local, [None])):
            yield sample


class Accumulating(int):
    """1, but it divides no number, so that `accelerator.accumulate` sees no end of a step."""

    def __rmod__(self, number: int) -> int:
        return 1


class SyncedStep:
    """A step that sets `accelerator.sync_gradients`: True in its last micro-batch, and outside.

    It stays so in `accelerator.accumulate`, which sets it to whether its calls are a multiple of
    `gradient_accumulation_steps`.
    """

    def __init__(self, accelerator: Any, step: StepBatches | TokenStep) -> None:
        self._accelerator, self._step = accelerator, step
        self.samples_known = step.samples_known

    @property
    def last(self) -> bool:
        """Whether the present micro-batch is the step's last on this rank."""
        return self._step.last

    @property
    def samples(self) -> int:
        """Samples of the step over all ranks, as far as is known."""
        return self._step.samples

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            for micro_batch in self._step:
                self._set_sync(self.last)
                yield micro_batch
        finally:
            self._set_sync(True)

    def _set_sync(self, is_last: bool) -> None:
        self._accelerator.sync_gradients = is_last
        self._accelerator.gradient_accumulation_steps = 1 if is_last else Accumulating(1)


class PreparedBatches(Batches):
    """`Batches` of a prepared loader."""

    global_samples: int | None = None  # of a pass over all ranks, where `batches` shards it
    accelerator: Any = None

    def step(self, *arguments: Any, **settings: Any) -> Any:
        """As `Batches`, for a loop that asks the accelerator whether gradients are synchronized."""
        step = super().step(*arguments, **settings)
        return None if step is None else SyncedStep(self.accelerator, step)


def batches(
    accelerator: Any, loader: Any, *, placed: bool = True, **options: Any
) -> PreparedBatches:
    """The batches of a prepared loader, with every sample once. Collective.

    Args:
        accelerator: the Accelerator that prepared the loader.
        loader: the prepared DataLoader.
        placed: whether micro-batches are moved to the accelerator's device, as accelerate would.
        options: as for `Batches`: `remainder`, `virtual_ranks`, `packed`, `unit` and so on.
    Raises:
        SettingError: the loader was not prepared, or it repeats samples that cannot be left out.
    """
    if isinstance(loader, DataLoaderDispatcher):
        if accelerator.num_processes > 1:
            raise SettingError(
                "dispatch_batches=True (accelerate's default for an IterableDataset) repeats "
                "samples at the end of a pass; pass Accelerator(dataloader_config="
                "DataLoaderConfiguration(dispatch_batches=False)), and drop_last=True to the "
                "DataLoader"
            )
        inner, device = loader.base_dataloader, accelerator.device
    elif isinstance(loader, DataLoaderShard):
        inner, device = _unsharded(accelerator, loader), loader.device
    else:
        raise SettingError(
            f"the loader is a {type(loader).__name__} that accelerate did not prepare; pass what "
            "accelerator.prepare returns for a DataLoader"
        )
    prepared = PreparedBatches(inner, **options)
    prepared.accelerator = accelerator
    sampler = getattr(getattr(inner, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, ShardedSampler):
        prepared.global_samples = sampler.total
    if placed and device is not None:
        prepared.place = lambda batch: send_to_device(batch, device, accelerator.non_blocking)
    return prepared


def _unsharded(accelerator: Any, loader: Any) -> Any:
    """The loader inside one of which every process reads its shard, without repeated samples."""
    base, ranks = loader.base_dataloader, accelerator.num_processes
    shard = base.sampler if isinstance(base.sampler, BatchSampler) else base.batch_sampler
    if loader.skip_batches or isinstance(shard, SkipBatchSampler):
        raise SettingError(
            "the loader skips batches of an interrupted pass; AdaptiveBatch restores its place by "
            "itself: pass the whole loader, and load the state of AdaptiveBatch"
        )
    if isinstance(base.dataset, IterableDataset):
        repeats = isinstance(base.dataset, IterableDatasetShard) and not base.dataset.drop_last
        if ranks > 1 and repeats:
            raise SettingError(
                "accelerate repeats samples of an IterableDataset at the end of a pass, to give "
                f"all {ranks} processes equally many; pass drop_last=True to the DataLoader"
            )
        return base
    inner = shard.batch_sampler if isinstance(shard, BatchSamplerShard) else shard
    sampler = getattr(inner, "sampler", None)
    if ranks == 1 and isinstance(sampler, (ElasticDistributedSampler, DistributedSampler)):
        return base  # these samplers resume anywhere, in one order for any number of ranks
    if type(inner) is BatchSampler and shard is base.batch_sampler:
        split = isinstance(shard, BatchSamplerShard) and shard.split_batches
        size = inner.batch_size // (ranks if split else 1)
        return _sharded(accelerator, loader, inner, size)
    if ranks > 1 and getattr(shard, "even_batches", True):
        raise SettingError(
            f"{type(inner).__name__} samples whole batches, of which accelerate repeats some on "
            f"{ranks} processes; pass DataLoaderConfiguration(even_batches=False) to Accelerator, "
            "or give the DataLoader batch_size= and sampler="
        )
    return base


def _sharded(accelerator: Any, loader: Any, inner: Any, size: int) -> DataLoader[Any]:
    """The same loader over the samples of this process alone; no sample is repeated."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    if ranks > 1:
        _synchronize(loader, inner.sampler)
    base = loader.base_dataloader
    multiple = size * ranks if inner.drop_last else 1
    sampler = BatchSampler(
        ShardedSampler(inner.sampler, rank, ranks, multiple), size, drop_last=False
    )
    options = {name: getattr(base, name) for name in _LOADER_OPTIONS}
    kind: type[DataLoader[Any]] = type(base)  # torch's own, or torchdata's stateful one
    return kind(base.dataset, batch_sampler=sampler, **options)


def _synchronize(loader: Any, sampler: Any) -> None:
    """Gives the sampler the same order on all processes. Collective."""
    if isinstance(sampler, (ElasticDistributedSampler, DistributedSampler)):
        raise SettingError(
            f"a {type(sampler).__name__} deals samples to ranks, and accelerate shards them a "
            "second time; give the DataLoader shuffle=True or a sampler of the whole data set"
        )
    rng_types = {str(getattr(kind, "value", kind)) for kind in loader.rng_types or ()}
    if synchronized := sorted(rng_types - {"generator"}):
        raise SettingError(
            f"rng_types={synchronized} gives all processes the same random numbers in every pass; "
            "leave rng_types out of Accelerator: the order is the same without it"
        )
    if hasattr(sampler, "initial_seed"):
        sampler.initial_seed = broadcast_object_list([sampler.initial_seed])[0]
    elif hasattr(sampler, "generator"):
        if sampler.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)
        synchronize_rng_states(["generator"], sampler.generator)
