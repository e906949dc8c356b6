"""A subset of a data set: indices of its samples, and a view of them."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils import data


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
    """At most `max_samples` of `chosen_indices(size, samples)`, which are not sorted by class.

    Example:
        >>> set(scored_indices(90, 50, 20)) <= set(chosen_indices(90, 50))
        True
        >>> len(scored_indices(90, 0, 20))
        20
    """
    return chosen_indices(size, min(samples or size, max_samples))
