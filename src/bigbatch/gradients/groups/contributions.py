"""What one use of a parameter adds to the gradient of each group: exactly, or projected.

The gradient of a matrix is a sum of outer products over the rows of the batch, L^T R, for which a
projection by m rows of signs needs m / (rows of the gradient) of the operations. Convolutions are
projected on both sides. See [Note: Groups of one backward] in `group_tap.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import to_device
from bigbatch.gradients.groups.grouping import Grouping, joined

SIGNS = 8  # rows of a matrix of random signs, m

_SHIFTS = 4093  # prime: positions in the pool of random signs


@dataclass
class Projection:
    """S g, or S g R^T for the channels of a convolution, with matrices of random signs."""

    rows: Tensor  # S, (m, rows of the gradient)
    columns: Tensor | None = None  # R, (m, its columns); None for none

    @property
    def scale(self) -> int:
        """c = m of S times m of R, with E |S g R^T|^2 = c |g|^2."""
        return self.rows.shape[0] * (1 if self.columns is None else self.columns.shape[0])

    def of(self, gradient: Tensor) -> Tensor:
        """The projection of a gradient (rows, ...) -> (m, ...)."""
        if gradient.dim() < 2:
            return self.rows @ gradient
        projected = self.rows @ gradient.flatten(1)
        if self.columns is None:
            return projected
        return self.columns @ projected.reshape(len(self.rows), gradient.shape[1], -1)


class SignPool:
    """Random signs for every step, the same for the same numbers: slices of a pool."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def signs(self, size: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(m, size) random signs."""
        pool = self._pools.get((device, dtype))
        if pool is None or pool.shape[1] < size + _SHIFTS:
            generator = torch.Generator().manual_seed(0)
            # one row for each size, so that a longer pool begins like a shorter one
            bits = torch.randint(2, (size + _SHIFTS, SIGNS), generator=generator, device="cpu")
            pool = bits.t().mul(2).sub(1).to(device, dtype)
            self._pools[device, dtype] = pool
        start = seed % _SHIFTS
        return pool[:, start : start + size]


class Rows:
    """A factor of a use by the rows of the batch, (B n, a), which several parameters may share."""

    def __init__(self, values: Tensor, grouping: Grouping) -> None:
        self.values, self.grouping = values, grouping
        self._projection: tuple[Tensor, Tensor] | None = None  # signs, and what they gave

    def projected(self, signs: Tensor) -> Tensor:
        """S L^T, (m, B n)."""
        if self._projection is None or self._projection[0] is not signs:
            self._projection = signs, signs @ self.values.t()
        return self._projection[1]


class Contribution(ABC):
    """What one use adds to the groups' gradients of a parameter."""

    @abstractmethod
    def exact(self) -> Tensor:
        """The gradients of the groups, (k, *shape)."""

    def projected(self, projection: Projection) -> Tensor:
        """S g of each group, (k, m, *shape[1:])."""
        return torch.stack([projection.of(gradient) for gradient in self.exact()])

    def transposed(self) -> "Contribution":
        """The same for the transposed parameter."""
        return GroupSums(self.exact().transpose(-1, -2))


@dataclass
class GroupSums(Contribution):
    """Sums that are small enough to be computed at once, (k, *shape)."""

    gradients: Tensor

    def exact(self) -> Tensor:
        """The sums."""
        return self.gradients


@dataclass
class OuterProducts(Contribution):
    """L^T R of each group, for a parameter of a rows and b columns: linear layers."""

    left: Rows
    right: Rows | None = None  # without it the sums of the rows of L, (k, a) or (k, m): the bias

    def exact(self) -> Tensor:
        """(k, a, b)."""
        parts = self.left.grouping.split(self.left.values)
        if self.right is None:
            return joined([part.sum(1) for part in parts])
        pairs = zip(parts, self.left.grouping.split(self.right.values), strict=True)
        return joined([torch.bmm(a.transpose(1, 2), b) for a, b in pairs])

    def projected(self, projection: Projection) -> Tensor:
        """(k, m, b)."""
        rows = self.left.projected(projection.rows)
        if self.right is None:
            return joined([part.sum(2).t() for part in self.left.grouping.split(rows, 1)])
        return _grouped_product(rows, self.right)

    def transposed(self) -> Contribution:
        """R^T L."""
        return super().transposed() if self.right is None else OuterProducts(self.right, self.left)


@dataclass
class EmbeddingRows(Contribution):
    """Sums of R over the rows of a table that are looked up: L is one-hot, from indices (B n,)."""

    indices: Tensor
    right: Rows
    table_rows: int

    def exact(self) -> Tensor:
        """(k, rows of the table, b)."""
        values, grouping = self.right.values, self.right.grouping
        sizes = [len(values) // grouping.samples * size for size in grouping.sizes]
        tables = torch.arange(grouping.groups).repeat_interleave(torch.tensor(sizes))
        rows = self.indices + self.table_rows * to_device(tables, values.device)
        table = values.new_zeros(grouping.groups * self.table_rows, values.shape[1])
        return table.index_add_(0, rows, values).view(grouping.groups, self.table_rows, -1)

    def projected(self, projection: Projection) -> Tensor:
        """(k, m, b)."""
        return _grouped_product(projection.rows[:, self.indices], self.right)


@dataclass
class Convolutions(Contribution):
    """The weight gradients of a convolution, from D (B, out, ...) and its input (B, in, ...)."""

    gradient: Tensor
    inputs: Tensor
    grouping: Grouping
    of_weight: Callable[[Tensor, Tensor], Tensor]  # (D, input) -> gradient of the weight

    def exact(self) -> Tensor:
        """(k, out, in, ...)."""
        return self._by_group(self.gradient, self.inputs)

    def projected(self, projection: Projection) -> Tensor:
        """(k, m of S, m of R, ...)."""
        rows, columns = projection.rows, projection.columns
        return self._by_group(_of_channels(rows, self.gradient), _of_channels(columns, self.inputs))

    def _by_group(self, gradient: Tensor, inputs: Tensor) -> Tensor:
        sizes = list(self.grouping.sizes)
        pairs = zip(torch.split(gradient, sizes), torch.split(inputs, sizes), strict=True)
        return torch.stack([self.of_weight(d, x) for d, x in pairs])


def group_sums(values: Tensor, grouping: Grouping, shape: torch.Size) -> Tensor:
    """Sums over the samples of each group, and over what was broadcast: (B, ...) -> (k, *shape)."""
    sums = joined([part.sum(1) for part in grouping.split(values)])
    missing = sums.dim() - 1 - len(shape)
    if missing > 0:
        sums = sums.sum(tuple(range(1, 1 + missing)))
    elif missing < 0:  # the batch was a dimension of the parameter, of size 1
        sums = sums.reshape(sums.shape[:1] + (1,) * -missing + sums.shape[1:])
    summed = [d for d, size in enumerate(shape, 1) if size == 1 and sums.shape[d] != 1]
    return sums.sum(summed, keepdim=True) if summed else sums


def _grouped_product(projection: Tensor, right: Rows) -> Tensor:
    """Sums over the rows of each group, (m, B n) and (B n, b) -> (k, m, b)."""
    split = right.grouping.split
    pairs = zip(split(projection, 1), split(right.values), strict=True)
    return joined([torch.bmm(q.transpose(0, 1), x) for q, x in pairs])


def _of_channels(signs: Tensor | None, images: Tensor) -> Tensor:
    """Signs (m, C) times (B, C, ...) -> (B, m, ...)."""
    if signs is None:
        return images
    return (signs @ images.flatten(2)).reshape(len(images), -1, *images.shape[2:])
