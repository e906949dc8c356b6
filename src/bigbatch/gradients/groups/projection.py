"""Random projections of a parameter's gradient that keep its squared norm on average."""

from dataclasses import dataclass

import torch
from torch import Tensor

SIGNS = 8  # rows of a matrix of random signs, m

_SHIFTS = 4093  # prime: positions in the pool of random signs


@dataclass(frozen=True)
class Projection:
    """S g, or S g R^T for the channels of a convolution, with matrices of random signs.

        E |S g R^T|^2 = c |g|^2,    c = m of S times m of R

    Args:
        rows: S, (m, rows of the gradient).
        columns: R, (m, its columns); None for none.
    """

    rows: Tensor
    columns: Tensor | None = None

    @property
    def scale(self) -> int:
        """c."""
        return len(self.rows) * (1 if self.columns is None else len(self.columns))

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
