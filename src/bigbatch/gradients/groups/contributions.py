"""What one use of a parameter adds to the gradient of each group: exactly, or projected.

The gradient of a matrix is a sum of outer products over the rows of the batch, L^T R. With random
signs S, E |S^T g|^2 = m |g|^2 for m columns of S, and S^T L^T R costs m / a of L^T R (a rows of g).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import FULL_PRECISION, sum_dtype
from bigbatch.gradients.groups.grouping import Grouping


@dataclass(frozen=True)
class Contribution:
    """The gradients of the groups as one tensor, (k, *shape of the parameter)."""

    gradients: Tensor

    def exact(self) -> Tensor:
        """The gradients of the groups, (k, *shape)."""
        return self.gradients

    def projected(self, signs: Tensor) -> Tensor:
        """S^T g of each group, (k, m, *shape[1:]); S has a row for each row of the parameter."""
        raise NotImplementedError

    def transposed(self) -> "Contribution":
        """The same for the transposed parameter."""
        return Contribution(self.exact().transpose(-1, -2))


@dataclass(frozen=True)
class OuterProducts(Contribution):
    """L^T R of each group, from L (B, n, a) and R (B, n, b): linear layers."""

    gradients: Tensor  # L
    right: Tensor
    grouping: Grouping

    def exact(self) -> Tensor:
        """(k, a, b)."""
        return _grouped_product(self.gradients, self.right, self.grouping)

    def projected(self, signs: Tensor) -> Tensor:
        """(k, m, b)."""
        left = _full_precision(self.gradients)
        return _grouped_product(left @ signs.to(left.dtype), self.right, self.grouping)

    def transposed(self) -> Contribution:
        """R^T L."""
        return OuterProducts(self.right, self.gradients, self.grouping)


@dataclass(frozen=True)
class EmbeddingRows(Contribution):
    """Sums of R over the rows of a table that are looked up: L is one-hot, from indices (B, n)."""

    gradients: Tensor  # indices
    right: Tensor
    grouping: Grouping
    table_rows: int

    def exact(self) -> Tensor:
        """(k, rows of the table, b)."""
        right = _full_precision(self.right)
        parts = zip(
            self.gradients.split(self.grouping.sizes),
            right.split(self.grouping.sizes),
            strict=True,
        )
        width = right.shape[-1]
        table = right.new_zeros(self.grouping.groups, self.table_rows, width)
        for group, (indices, rows) in zip(table, parts, strict=True):
            group.index_add_(0, indices.reshape(-1), rows.reshape(-1, width))
        return table

    def projected(self, signs: Tensor) -> Tensor:
        """(k, m, b)."""
        left = signs.to(sum_dtype(self.right.dtype))[self.gradients]
        return _grouped_product(left, self.right, self.grouping)


@dataclass(frozen=True)
class Convolutions(Contribution):
    """The weight gradients of a convolution, from D (B, out, ...) and its input (B, in, ...)."""

    gradients: Tensor  # D
    right: Tensor
    grouping: Grouping
    weight_gradient: Callable[[Tensor, Tensor, int], Tensor]  # (D, input, out) -> gradient
    channels: int

    def exact(self) -> Tensor:
        """(k, out, in, ...)."""
        return self._by_group(self.gradients, self.channels)

    def projected(self, signs: Tensor) -> Tensor:
        """(k, m, in, ...)."""
        flat = _full_precision(self.gradients).flatten(2)
        projected = signs.to(flat.dtype).t() @ flat
        return self._by_group(
            projected.unflatten(2, self.gradients.shape[2:]), signs.shape[1]
        )

    def _by_group(self, gradients: Tensor, channels: int) -> Tensor:
        parts = zip(
            gradients.split(self.grouping.sizes),
            _full_precision(self.right).split(self.grouping.sizes),
            strict=True,
        )
        dtype = sum_dtype(gradients.dtype)
        return torch.stack([self.weight_gradient(d.to(dtype), x, channels) for d, x in parts])


def group_sums(values: Tensor, grouping: Grouping, shape: torch.Size) -> Tensor:
    """Sums over the samples of each group, and over what was broadcast: (B, ...) -> (k, *shape)."""
    sums = torch.cat([part.sum(1, dtype=sum_dtype(values.dtype)) for part in grouping.split(values)])
    missing = sums.dim() - 1 - len(shape)
    if missing > 0:
        sums = sums.sum(tuple(range(1, 1 + missing)))
    elif missing < 0:  # the batch was a dimension of the parameter, of size 1
        sums = sums.reshape(sums.shape[:1] + (1,) * -missing + sums.shape[1:])
    summed = [d for d, size in enumerate(shape, 1) if size == 1 and sums.shape[d] != 1]
    return sums.sum(summed, keepdim=True) if summed else sums


def _grouped_product(left: Tensor, right: Tensor, grouping: Grouping) -> Tensor:
    """L^T R of each group, (k, a, b)."""
    left, right = _full_precision(left), _full_precision(right)
    parts = [
        torch.bmm(a.flatten(1, 2).transpose(1, 2), b.flatten(1, 2))
        for a, b in zip(grouping.split(left), grouping.split(right), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in FULL_PRECISION else tensor.float()
