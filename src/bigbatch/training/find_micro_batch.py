"""How many samples of a micro-batch fit in memory."""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bigbatch.data.collate import Batch, concatenate_samples, count_samples, slice_samples
from bigbatch.data.loader_state import ResumableLoader
from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.errors import RankError, SettingError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.auto import find_source
from bigbatch.setting_types import CHECKED_ELSEWHERE, Count, Share, checked
from bigbatch.training.oom_hints import is_out_of_memory
from bigbatch.training.optimizer_checks import require_steppable
from bigbatch.training.snapshot import TrainingSnapshot


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
    of that batch, which should be as large as they get (the longest sequences), in two optimizer
    steps of two backwards. On a GPU a size is too large, too, for which the allocator has to give
    its cache back and ask again.

    Afterwards all is as before, after an error too: weights, buffers, gradients, the optimizer (by
    its state dict), training modes, random states, the loader's order. Until then it is kept in
    the CPU's memory, so it takes none of a GPU's. Attributes that a forward sets stay as they are.
    Call it before a GradientMeter or AdaptiveBatch is made.

    Ranks try the same sizes; what is too large for one is too large for all. Under DDP a rank that
    runs out of memory lets nobody wait. Under fully_shard (FSDP2), or with SyncBatchNorm, a forward
    waits for the other ranks, and one that fails alone leaves them there until the group's timeout:
    choose `most` so that every size that is tried surely fits.

    Most systems kill a process before they refuse it memory of the CPU: give `most` there too, or
    limit the process (`ulimit -v`).

    Args:
        model: as it is trained: wrapped, on its device, in its mode.
        optimizer: any whose step needs no closure.
        loader: as for AdaptiveBatch, not inside `Batches`; its batches are cut along their samples.
        loss_of: batch -> mean loss, one number; brings the batch to the device as training does.
        most: upper limit of the answer; default: the loader's samples. Sizes up to
            most / (1 - margin) are tried.
        margin: share of the samples that is left off, in [0, 1), since later batches may be larger,
            and an allocator's memory is more fragmented after a thousand steps than after two.
    Returns:
        What to pass as `micro_batch`, the same on every rank.
    Raises:
        SettingError: one sample does not fit, a closure is needed, nobody says `most`, or FSDP2 of
            a torch before 2.13, which cannot continue after an error.
        RankError: `loss_of` or the optimizer failed on another rank.
    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> loader = DataLoader(torch.randn(64, 4), batch_size=16)
        >>> largest_micro_batch(model, optimizer, loader, lambda x: model(x).square().mean())
        64
    """
    require_steppable(optimizer)
    source, known = find_source(model), ResumableLoader(loader)
    most = known.length if most is None else most
    if most is None:
        raise SettingError("the loader does not say how many samples it has; pass most=")
    before = TrainingSnapshot(model, optimizer, known)
    torch.cuda.empty_cache()
    try:
        trials = _Trials(model, optimizer, loss_of, _first_batch(known), source, before)
        table = trials.agreement.all_gather(trials.samples, most)
        start, most = (int(min(column)) for column in zip(*table, strict=True))
        bound = math.ceil(most / (1 - margin))
        with _no_rank_waits(model, source):
            largest = _search(trials.fits, min(start, bound), bound)
    finally:
        before.put_back()
    if not largest:
        raise SettingError(
            "one sample does not fit in memory: take a smaller model, lower precision, or "
            "activation checkpointing"
        )
    return most if largest == bound else max(1, int(largest * (1 - margin)))


# the search


def _search(fits: Callable[[int], bool], start: int, bound: int) -> int:
    """The largest size that fits, at most `bound`; 0 where none does."""
    fitting, size = 0, start
    while fits(size):
        if size == bound:
            return bound
        fitting, size = size, min(2 * size, bound)
    too_large = size
    while too_large - fitting > 1:
        size = (fitting + too_large) // 2
        if fits(size):
            fitting = size
        else:
            too_large = size
    return fitting


class _Trials:
    """Whether every rank has the memory for two steps with micro-batches of a size."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_of: Callable[[Batch], Tensor],
        batch: Batch,
        source: GradientSource,
        before: TrainingSnapshot,
    ) -> None:
        self.samples = count_samples(batch)
        self.agreement = HostCollectives(source)
        self._model, self._optimizer = model, optimizer
        self._loss_of, self._batch = loss_of, batch
        self._before = before
        self._devices = {p.device for p in source.parameters if p.is_cuda}

    def fits(self, size: int) -> bool:
        """Collective. Puts everything back."""
        failed: Exception | None = None  # otherwise than for lack of memory
        retries = self._retries()
        try:
            self._train(size)
            too_large = self._retries() > retries
        except Exception as error:
            too_large = is_out_of_memory(error)
            failed = None if too_large else error
        self._before.put_back()  # by now the error is gone, and what its frames held
        if too_large:
            gc.collect()
        torch.cuda.empty_cache()  # does nothing where no GPU is used
        rows = self.agreement.all_gather(too_large, failed is not None)
        if failed is not None:
            raise failed
        if any(elsewhere for _, elsewhere in rows):
            raise RankError(f"a micro-batch of {size} samples failed on another rank; see there")
        return not any(too_large for too_large, _ in rows)

    def _train(self, size: int) -> None:
        times, rest = divmod(size, self.samples)
        parts = [self._batch] * times + [slice_samples(self._batch, 0, rest)] * (rest > 0)
        batch = concatenate_samples(parts)
        stepped: Any = self._optimizer
        if getattr(stepped, "attached", None):  # it scales in a reduction, and a trial has none
            stepped = stepped.base
        with warnings.catch_warnings(action="ignore"):  # of micro-batches that are the same
            for _ in range(2):  # the first step makes the optimizer's state
                self._optimizer.zero_grad()
                self._model.zero_grad()  # what the optimizer does not hold has .grad too
                for _ in range(2):  # the first backward makes .grad
                    (self._loss_of(batch) / 2).backward()  # type: ignore[no-untyped-call]
                stepped.step()

    def _retries(self) -> int:
        """How often an allocator gave its cache back to be able to continue."""
        stats = [torch.cuda.memory_stats(device) for device in self._devices]
        return sum(of_one.get("num_alloc_retries", 0) for of_one in stats)


@contextmanager
def _no_rank_waits(model: nn.Module, source: GradientSource) -> Iterator[None]:
    """DDP joins no gradients, and sends no buffers around before a forward."""
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    sends = [wrapper.require_forward_param_sync for wrapper in wrappers]
    source.synchronize(False)
    for wrapper in wrappers:
        wrapper.require_forward_param_sync = False
    try:
        yield
    finally:
        source.synchronize(True)
        for wrapper, before in zip(wrappers, sends, strict=True):
            wrapper.require_forward_param_sync = before


def _first_batch(loader: ResumableLoader) -> Batch:
    batches: Any = loader.batches
    if isinstance(batches, DataLoader):
        batches = copy.copy(batches)
        batches._iterator = None  # persistent workers are left alone
    for batch in batches:
        loader.require_samples(count_samples(batch), remedy="give a loader of full batches")
        return batch
    raise SettingError("the loader is empty; give one with at least one batch")
