"""How the samples of a backward are cut into groups, and which part of a tensor each group has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from torch import Tensor

from bigbatch.setting_types import In

Groups = Annotated[int, In("[2, inf)", "one leaves nothing to compare")]

RowOrder = Literal["sample-major", "sample-minor"]
"""The order of flattened rows: all of one sample first, or one of every sample first."""


@dataclass(frozen=True)
class Grouping:
    """Consecutive samples in groups whose sizes differ by at most one, larger groups first.

    Args:
        samples: B, samples of the backward.
        groups: k, at most B.
    Example:
        >>> Grouping(samples=7, groups=3).sizes
        (3, 2, 2)
    """

    samples: int
    groups: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each group."""
        size, larger = divmod(self.samples, self.groups)
        return (size + 1,) * larger + (size,) * (self.groups - larger)

    def sums(self, weights: Sequence[float] | Tensor) -> list[float]:
        """The sum of the samples' weights in each group."""
        weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        return [float(part.sum()) for part in weights.split(self.sizes)]

    def split(self, tensor: Tensor, dim: int = 0) -> list[Tensor]:
        """Cuts `dim`, of size B, into (groups, samples of each), for groups of equal size each."""
        size, larger = divmod(self.samples, self.groups)
        if not larger:
            return [tensor.unflatten(dim, (self.groups, size))]
        cut = larger * (size + 1)
        return [
            tensor.narrow(dim, 0, cut).unflatten(dim, (larger, size + 1)),
            tensor.narrow(dim, cut, self.samples - cut).unflatten(
                dim, (self.groups - larger, size)
            ),
        ]

    def by_sample(self, rows: Tensor, order: RowOrder) -> Tensor:
        """(rows, ...) -> (B, rows of a sample, ...)."""
        if order == "sample-major":
            return rows.unflatten(0, (self.samples, -1))
        return rows.unflatten(0, (-1, self.samples)).transpose(0, 1)
