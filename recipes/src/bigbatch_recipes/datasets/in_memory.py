"""Data sets that return whole batches: tensors in memory, and a subset of another data set."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import Dataset, TensorDataset


class BatchDataset(Dataset[tuple[Tensor, ...]]):
    """A data set whose `__getitems__` returns a batch, a tuple of tensors."""

    def __getitem__(self, index: int) -> Any:
        return tuple(column[0] for column in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The samples of these indices as a batch."""
        raise NotImplementedError


class InMemoryDataset(TensorDataset):
    """Tensors of equal length; a batch is one indexing of each."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The samples of these indices as a batch."""
        return tuple(tensor[list(indices)] for tensor in self.tensors)


def identity_collate(batch: Any) -> Any:
    """The `collate_fn` of a data set whose `__getitems__` returns a batch."""
    return batch


class Subset(data.Subset[Any]):
    """A subset that passes `set_epoch` on to a data set that has it."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the whole data set."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def chosen_indices(size: int, samples: int) -> Sequence[int]:
    """Indices of `samples` random samples of a data set, the same for every seed.

    A smaller subset is part of a larger one. An index takes 4 bytes, 8 from 2^32 samples on; during
    the draw, each sample of the data set takes 8 bytes more.

    Example:
        >>> chosen_indices(3, 0), sorted(chosen_indices(3, 3))
        (range(0, 3), [0, 1, 2])
        >>> set(chosen_indices(9, 2)) <= set(chosen_indices(9, 5))
        True
    """
    if not 0 < samples < size:
        return range(size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:samples]
    code, dtype = ("I", numpy.uint32) if size < 2**32 else ("Q", numpy.uint64)
    return array(code, order.numpy().astype(dtype).tobytes())  # in a list an index takes 40 bytes


def scored_indices(size: int, samples: int, max_samples: int) -> Sequence[int]:
    """At most `max_samples` of `chosen_indices(size, samples)`, which are not sorted by class."""
    return chosen_indices(size, min(samples or size, max_samples))
