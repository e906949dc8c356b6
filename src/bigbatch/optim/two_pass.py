"""Two passes over a list of layers, of which the second uses sums over each whole layer.

Kernels do the layers whose arrays fit them, torch the others; sums are over all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch.gradients.dtypes import widest_float
from bigbatch.kernels import native
from bigbatch.optim.sharding import AllReduce


@dataclass(frozen=True)
class TwoPass:
    """A rule over layers, both as a kernel and as functions of a layer's number."""

    rule: native.Rule  # the kernel
    layers: Sequence[native.Layer]  # the arrays of each layer, in the kernel's order
    layer_values: Sequence[tuple[float, float]]  # two numbers for each layer
    group_values: Sequence[float]  # the numbers that all layers share
    first_pass: Callable[[int], Tensor]  # returns the sums of a layer, (2,)
    # updates a layer with its sums; may return statistics, (5,)
    second_pass: Callable[[int, Tensor], Tensor | None]
    watch: bool = False  # whether kernels return statistics

    def run(self, *, fused: bool, all_reduce: AllReduce | None) -> Tensor:
        """Runs both passes.

        Args:
            fused: whether kernels may be used.
            all_reduce: sums (layers, 2) values over the ranks that have the rest, in place;
                None where this rank has them whole.
        Returns:
            The statistics of each layer, (layers, 5); zeros if not watched.
        """
        fits = [fused and native.fits(*arrays) for arrays in self.layers]
        by_kernel = [i for i, fit in enumerate(fits) if fit]
        by_torch = [i for i, fit in enumerate(fits) if not fit]
        sums, rows = self._zeros(2), self._zeros(5)
        for i in by_torch:
            sums[i] = self.first_pass(i)
        if all_reduce is not None:
            if by_kernel:
                sums[by_kernel], _ = self._kernel(by_kernel, native.Passes.FIRST)
            all_reduce(sums)
        if by_kernel and all_reduce is None:
            _, rows[by_kernel] = self._kernel(by_kernel, native.Passes.BOTH)
        elif by_kernel:
            _, rows[by_kernel] = self._kernel(by_kernel, native.Passes.SECOND, sums[by_kernel])
        for i in by_torch:
            row = self.second_pass(i, sums[i])
            if row is not None:
                rows[i] = row
        return rows

    def _zeros(self, columns: int) -> Tensor:
        device = self.layers[0][0].device if self.layers else torch.device("cpu")
        return torch.zeros(len(self.layers), columns, dtype=widest_float(device), device=device)

    def _kernel(
        self, numbers: list[int], passes: native.Passes, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return native.run(
            self.rule,
            [self.layers[i] for i in numbers],
            [value for i in numbers for value in self.layer_values[i]],
            self.group_values,
            passes=passes,
            sums=sums,
            watch=self.watch,
        )


def require_kernels(fused: bool | None) -> None:
    """Raises SettingError if fused=True and the kernels were not built."""
    if fused and native.library() is None:
        raise SettingError(
            "fused=True, and no kernels were built when bigbatch was installed; install it "
            "again where there is a C compiler, or leave fused out"
        )
