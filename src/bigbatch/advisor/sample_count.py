"""How many samples a backward has, and where they are in the tensors of the model's call."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from bigbatch.advisor.forward_watch import ForwardWatch, ModuleCall
from bigbatch.advisor.found_training import living
from bigbatch.errors import SettingError

_REMEDY = "state the samples of a backward and rank by --micro-batch (bb.advise: micro_batch=)"

Stated = tuple[int, int | None]
"""Samples of a backward that the user states, and their dimension if that is stated too."""


@dataclass(frozen=True)
class SampleCount:
    """The samples of a backward of one rank."""

    samples: int  # as the user or the program's loader counts them
    rows: int  # entries for these in dimension `dim` of the first tensor; 0 if none has them
    dim: int
    is_sum: bool = False  # whether the forwards of a backward are of different samples
    counted: str = ""  # who counts so; empty if the rows are the samples
    doubt: str = ""  # what does not fit; empty if everything does


def parse_samples(value: int | str | None) -> Stated | None:
    """(samples, dimension) of 20, "20" or "20@1"; raises SettingError for others."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]+)(?:@([0-9]+))?", str(value))
    if match is None or not int(match[1]):
        raise SettingError(
            f"{value!r} must be samples of a backward, as 20, or as 20@1 in dimension 1"
        )
    return int(match[1]), None if match[2] is None else int(match[2])


def count_samples(
    forwards: ForwardWatch, model: nn.Module, stated: Stated | None, of_loader: float
) -> SampleCount:
    """What a backward's samples are, from the calls of the model before it.

    What the user states settles it, then the loader that the program reads. Otherwise the length of
    the first tensor is compared with the other tensors, the layers and all loaders.

    Args:
        forwards: has seen a backward.
        model: the model.
        stated: what the user states; None if nothing.
        of_loader: samples that the program's loader yielded for a backward; 0 if unknown.
    Raises:
        SettingError: it is unknown how many samples the call has, or the stated dimension has none.
    """
    call, calls = forwards.last, len(forwards.sizes)
    assert call is not None
    samples, dim = stated or (int(of_loader) if of_loader.is_integer() else 0, None)
    total = sum(filter(None, forwards.sizes))
    is_sum = forwards.is_sum or (calls > 1 and dim is None and samples == total)
    if stated is None and not is_sum:
        require_one_size(forwards.sizes)
    shape = (total if is_sum else call.shape[0], *call.shape[1:])
    if dim is None:
        dim = shape.index(samples) if samples in shape else 0
    rows = shape[dim] if dim < len(shape) else 0
    if samples and (rows == 1 or (rows and rows % samples == 0)):
        counted = "--micro-batch" if stated else "its DataLoader"
        return SampleCount(samples, rows, dim, is_sum, "" if rows == samples else counted)
    if stated and stated[1] is not None:
        raise SettingError(
            f"--micro-batch {samples}@{dim}, but the model's first tensor has shape "
            f"{shape}: no multiple of {samples} in dimension {dim}"
        )
    if stated:
        return SampleCount(samples, 0, 0)
    doubt = "" if is_sum and not samples else _doubt(call, calls, model, samples)
    return SampleCount(shape[0], shape[0], 0, is_sum, doubt=doubt)


def require_one_size(sizes: Sequence[int | None]) -> None:
    """Raises SettingError if the forwards before a backward have different numbers of samples."""
    if None in sizes or len(set(sizes)) > 1:
        raise SettingError(
            f"the model was called {len(sizes)} times before one backward, with "
            f"{', '.join(map(str, sizes))} samples, so it is unknown how many there are; {_REMEDY}"
        )


def _doubt(call: ModuleCall, calls: int, model: nn.Module, of_loader: int) -> str:
    loaders = living(DataLoader)
    samplers = [getattr(loader, "batch_sampler", None) for loader in loaders]
    sizes = {getattr(thing, "batch_size", None) for thing in (*loaders, *samplers)}
    known = [of_loader] if of_loader else sorted(n for n in sizes if isinstance(n, int))
    if call.samples in known:
        return ""
    lengths = [length for length in call.lengths if length != 1]
    if len(lengths) > 1:
        raise SettingError(
            f"the tensors of the model's call have {_join(lengths)} in dimension 0, so it is "
            f"unknown how many samples it has; {_REMEDY}"
        )
    layer = next((m for m in model.modules() if getattr(m, "batch_first", None) is False), None)
    if layer is not None:
        raise SettingError(
            f"{type(layer).__name__} has batch_first=False, so dimension 0 of the model's first "
            f"tensor, of length {call.samples}, may be positions and not samples; {_REMEDY}"
        )
    if known:
        return (
            f"the model gets {call.samples} samples in a backward, and no DataLoader has such "
            f"batches, but of {_join(known)}; if they are not {call.samples} independent samples "
            f"(packed sequences, two views of each?), {_REMEDY}"
        )
    if calls > 1:
        return (
            f"the model is called {calls} times before a backward, with {call.samples} samples, "
            f"which are taken for the same; if they are parts of one batch, {_REMEDY}"
        )
    return ""


class LoaderWatch:
    """Watches which of the program's loaders it reads, how much, and how long that takes."""

    def __init__(self) -> None:
        self.has_read = False  # whether the program has read one
        self._yielded = _yielded()
        self._seconds = 0.0  # of loaders since the last call
        self._next: Any = _BaseDataLoaderIter.__next__

        def timed(iterator: _BaseDataLoaderIter) -> Any:
            began, self.has_read = time.perf_counter(), True
            try:
                return self._next(iterator)
            finally:
                self._seconds += time.perf_counter() - began

        self._timed: Any = timed
        _BaseDataLoaderIter.__next__ = self._timed  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        """Leaves the loaders as they were."""
        if _BaseDataLoaderIter.__next__ is self._timed:
            _BaseDataLoaderIter.__next__ = self._next  # type: ignore[method-assign]

    def take_seconds(self) -> float:
        """Seconds in which loaders gave batches since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def samples(self) -> float:
        """Samples that the only loader that is read yielded since the last call; 0 if unknown."""
        before, self._yielded = self._yielded, _yielded()
        read = [(i, n - before.get(i, 0)) for i, n in self._yielded.items()]
        batches = [(iterator, number) for iterator, number in read if number > 0]
        if len(batches) != 1:
            return 0.0
        (iterator, number), *_ = batches
        sampler: Any = iterator._index_sampler
        size = getattr(sampler, "batch_size", None)
        if not isinstance(size, int):
            return 0.0
        # accelerate's, which gives each rank a part of every batch
        ranks = sampler.num_processes if getattr(sampler, "split_batches", False) else 1
        return number * size / ranks


def _yielded() -> dict[_BaseDataLoaderIter, int]:
    """The batches that each iterator of a loader has yielded."""
    return {iterator: iterator._num_yielded for iterator in living(_BaseDataLoaderIter)}


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
