"""The largest micro-batch that fits in memory."""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bigbatch.data.accelerator import Accelerator
from bigbatch.data.collate import Batch, concatenate_samples, count_samples, slice_samples
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import RankError, SettingError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.auto import find_source
from bigbatch.setting_types import CHECKED_ELSEWHERE, Count, Share, checked
from bigbatch.training.oom_hints import is_out_of_memory
from bigbatch.training.snapshot import TrainingSnapshot
from bigbatch.training.training_parts import steppable


@checked
def largest_micro_batch(
    model: nn.Module,
    optimizer: Annotated[Optimizer, CHECKED_ELSEWHERE],
    loader: Iterable[Batch],
    loss_of: Callable[[Batch], Tensor],
    *,
    most: Count | None = None,
    margin: Share = 0.1,
) -> int:
    """The most samples that one backward has memory for, less a margin.

        int(largest * (1 - margin)), at least 1 and at most `most`

    Sizes are doubled from that of the loader's first batch, then bisected. Each is tried on copies
    of that batch, which should be as large as batches get (the longest sequences), in two optimizer
    steps of two backwards.

    Afterwards, also after an error, everything is restored from copies on the CPU, random states
    and the loader's order too; attributes that a forward sets stay. Call it before a GradientMeter
    or AdaptiveBatch is made.

    A size that is too large for one rank is too large for all. Under fully_shard (FSDP2), or with
    SyncBatchNorm, a forward waits for the other ranks, so a rank that fails alone leaves them
    waiting until the group's timeout: choose `most` so that every size that is tried surely fits.
    Do so for memory of the CPU too, where most systems kill a process first, or limit the process
    (`ulimit -v`).

    Args:
        model: the model as it is trained: wrapped, on its device, in its mode.
        optimizer: any optimizer whose step needs no closure.
        loader: as for AdaptiveBatch, not inside `Batches`; its batches are cut along their samples.
        loss_of: batch -> mean loss, one number; moves the batch to the device as training does.
        most: upper limit of the result; default: the loader's samples. Sizes up to
            most / (1 - margin) are tried.
        margin: share of the samples that is left off, in [0, 1), since later batches may be larger
            and memory more fragmented.
    Returns:
        The value for `micro_batch`, the same on every rank.
    Raises:
        SettingError: one sample does not fit, a closure is needed, `most` is unknown, or FSDP2 of
            a torch before 2.13, which cannot continue after an error.
        RankError: `loss_of` or the optimizer failed on another rank.
    Example:
        >>> import torch
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> loader = DataLoader(torch.randn(64, 4), batch_size=16)
        >>> largest_micro_batch(model, optimizer, loader, lambda x: model(x).square().mean())
        64
    """
    optimizer = steppable(optimizer)
    source, resumable = find_source(model), ResumableLoader(loader)
    most = resumable.length if most is None else most
    if most is None:
        raise SettingError("the loader does not say how many samples it has; pass most=")
    snapshot, collectives = TrainingSnapshot(model, optimizer), HostCollectives(source)
    loader_state = resumable.state_dict()
    Accelerator().empty_cache()
    try:
        batch = _first_batch(resumable)
        train = partial(_train, model, optimizer, loss_of, batch)
        rows = collectives.all_gather(count_samples(batch), most)
        start, most = (int(min(column)) for column in zip(*rows, strict=True))
        bound = math.ceil(most / (1 - margin))
        with _without_synchronization(model, source):
            fits = partial(_fits, train, collectives, snapshot)
            largest = _search(fits, min(start, bound), bound)
    finally:
        resumable.resume_between_passes(loader_state)
        snapshot.restore()
    if not largest:
        raise SettingError(
            "one sample does not fit in memory: take a smaller model, lower precision, or "
            "activation checkpointing"
        )
    return most if largest == bound else max(1, int(largest * (1 - margin)))


def _search(fits: Callable[[int], bool], start: int, bound: int) -> int:
    """The largest size that fits, at most `bound`; 0 if none does."""
    largest, too_large, size = 0, bound + 1, start
    while too_large - largest > 1:
        if fits(size):
            largest = size
        else:
            too_large = size
        is_bounded = too_large <= bound  # sizes are doubled until one is too large
        size = (largest + too_large) // 2 if is_bounded else min(2 * largest, bound)
    return largest


def _fits(
    train: Callable[[int], None],
    collectives: HostCollectives,
    snapshot: TrainingSnapshot,
    size: int,
) -> bool:
    """Whether every rank has the memory to train with micro-batches of a size. Collective."""
    failure: Exception | None = None  # for another reason than lack of memory
    too_large = False
    try:
        train(size)
    except Exception as error:
        too_large = is_out_of_memory(error)
        failure = None if too_large else error
    snapshot.restore()  # the error is gone by now, and with it the tensors of its frames
    if too_large:
        gc.collect()
    Accelerator().empty_cache()
    rows = collectives.all_gather(too_large, failure is not None)
    if failure is not None:
        raise failure
    if any(failed for _, failed in rows):
        raise RankError(f"a micro-batch of {size} samples failed on another rank; see there")
    return not any(too_large for too_large, _ in rows)


def _train(
    model: nn.Module, optimizer: Any, loss_of: Callable[[Batch], Tensor], batch: Batch, size: int
) -> None:
    """Two steps of two micro-batches, made of copies of a batch."""
    copies, rest = divmod(size, count_samples(batch))
    batch = concatenate_samples([batch] * copies + [slice_samples(batch, 0, rest)] * (rest > 0))
    # one that is attached scales in a reduction, and a trial has none
    stepped = optimizer.base if getattr(optimizer, "attached", None) else optimizer
    with warnings.catch_warnings(action="ignore"):  # about micro-batches that are the same
        for _ in range(2):  # the first step makes the optimizer's state
            optimizer.zero_grad()
            model.zero_grad()  # parameters that the optimizer does not hold have .grad too
            for _ in range(2):  # the first backward makes .grad
                (loss_of(batch) / 2).backward()  # type: ignore[no-untyped-call]
            stepped.step()


@contextmanager
def _without_synchronization(model: nn.Module, source: GradientSource) -> Iterator[None]:
    """Lets DDP reduce no gradients, and send no buffers before a forward."""
    name, reducer = "require_forward_param_sync", source.reducer
    with ExitStack() as undo:
        undo.callback(reducer.set_requires_gradient_sync, True)
        reducer.set_requires_gradient_sync(False)
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, False)
        yield


def _first_batch(loader: ResumableLoader) -> Batch:
    batches: Any = loader.batches
    if isinstance(batches, DataLoader):
        batches = copy.copy(batches)
        batches._iterator = None  # persistent workers are not used
    for batch in batches:
        loader.require_samples(count_samples(batch), remedy="give a loader of full batches")
        return batch
    raise SettingError("the loader is empty; give one with at least one batch")
