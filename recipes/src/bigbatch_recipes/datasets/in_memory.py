"""Data sets that return whole batches, and one in memory."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


class BatchDataset(Dataset[tuple[Tensor, ...]]):
    """A data set whose `__getitems__` returns a batch, a tuple of tensors."""

    def __getitem__(self, index: int) -> Any:
        return tuple(column[0] for column in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The samples of these indices as a batch."""
        raise NotImplementedError


class InMemoryDataset(TensorDataset):
    """Tensors of equal length; a batch is one indexing of each.

    Example:
        >>> import torch
        >>> InMemoryDataset(torch.arange(4), torch.eye(4)).__getitems__([1, 3])[0]
        tensor([1, 3])
    """

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The samples of these indices as a batch."""
        return tuple(tensor[list(indices)] for tensor in self.tensors)


def identity_collate(batch: Any) -> Any:
    """The `collate_fn` of a data set whose `__getitems__` returns a batch."""
    return batch
