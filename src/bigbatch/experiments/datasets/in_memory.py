"""A data set in memory that gives whole batches."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from bigbatch.errors import SettingError


class InMemoryDataset(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal length, side by side; a batch is one indexing of each.

    Args:
        columns: (samples, ...) each.
    Raises:
        SettingError: none, or of unequal length.
    Example:
        >>> import torch
        >>> InMemoryDataset(torch.arange(4), torch.eye(4)).__getitems__([1, 3])[0]
        tensor([1, 3])
    """

    def __init__(self, *columns: Tensor) -> None:
        if len({len(column) for column in columns}) != 1:
            raise SettingError(f"columns of {[len(column) for column in columns]} rows; need equal")
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The rows of these indices, a batch of them."""
        return tuple(column[list(indices)] for column in self.columns)


def identity_collate(batch: Any) -> Any:
    """The `collate_fn` of a data set whose `__getitems__` gives a whole batch."""
    return batch
