"""Two passes over a list of layers, the second knowing sums over the whole of each.

By kernels where the arrays fit them, else by torch; joined over the ranks that hold parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch.gradients.dtypes import widest_float
from bigbatch.kernels import native
from bigbatch.optim.sharding import Join


@dataclass(frozen=True)
class TwoPass:
    """A rule over layers, both as a kernel and as functions of a layer's number.

    Args:
        rule: the kernel.
        layers: the arrays of each layer, as the kernel takes them.
        own, group: its numbers, two a layer and those of all.
        first: the sums of a layer, (2,); None for a rule that needs none.
        second: what is done with them; may tell something, (5,).
        watch: whether to tell it.
    """

    rule: native.Rule
    layers: Sequence[native.Layer]
    own: Sequence[tuple[float, float]]
    group: Sequence[float]
    first: Callable[[int], Tensor] | None
    second: Callable[[int, Tensor], Tensor | None]
    watch: bool = False

    def run(self, *, fused: bool, join: Join | None) -> Tensor:
        """Does it.

        Args:
            fused: whether kernels may be used.
            join: adds up (layers, 2) sums over the ranks that have the rest; None: one rank.
        Returns:
            What the second pass returned of each layer, (layers, 5); else zeros.
        """
        fits = [fused and native.fits(*arrays) for arrays in self.layers]
        kernels = [i for i, fit in enumerate(fits) if fit]
        others = [i for i, fit in enumerate(fits) if not fit]
        sums, rows = self._zeros(2), self._zeros(5)
        if self.first is not None:
            if kernels and join is not None:
                sums[kernels], _ = self._kernel(kernels, native.Which.FIRST)
            for i in others:
                sums[i] = self.first(i)
            if join is not None:
                join(sums)
        if kernels:
            both = self.first is not None and join is None
            passes = native.Which.BOTH if both else native.Which.SECOND
            _, rows[kernels] = self._kernel(kernels, passes, None if both else sums[kernels])
        for i in others:
            seen = self.second(i, sums[i])
            if seen is not None:
                rows[i] = seen
        return rows

    def _zeros(self, columns: int) -> Tensor:
        first = self.layers[0][0] if self.layers else None
        device = torch.device("cpu") if first is None else first.device
        return torch.zeros(len(self.layers), columns, dtype=widest_float(device), device=device)

    def _kernel(
        self, chosen: list[int], passes: native.Which, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return native.run(
            self.rule,
            [self.layers[i] for i in chosen],
            [number for i in chosen for number in self.own[i]],
            self.group,
            passes=passes,
            sums=sums,
            watch=self.watch,
        )


def require_kernels(fused: bool | None) -> None:
    """Raises SettingError where kernels are asked for and were not built."""
    if fused and native.library() is None:
        raise SettingError(
            "fused=True, and no kernels were built when bigbatch was installed; install it "
            "again where there is a C compiler, or leave fused out"
        )
