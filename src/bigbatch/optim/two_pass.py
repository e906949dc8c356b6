"""Two passes over a list of layers, of which the second uses sums over each whole layer.

Kernels do the layers whose arrays fit them, torch the others; sums are over all ranks.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import SettingError, StateError
from bigbatch.gradients.dtypes import widest_float
from bigbatch.kernels import native
from bigbatch.optim.sharding import AllReduce

_ON_CPU = 1 << 16  # elements of a chunk, 256 KB in float32, which stay in cache
_ON_DEVICE = 1 << 23  # 32 MB, which bounds the memory of what is computed
_SHAPE = operator.attrgetter("shape")
_SIGNATURE = operator.attrgetter("device", "dtype")


@dataclass(frozen=True)
class Chunk:
    """Several layers, or a part of one, which torch computes as one flat tensor per column."""

    columns: Sequence[Sequence[Tensor] | None]
    layers: slice  # which layers they are
    layer_values: Sequence[tuple[float, float]]  # two numbers for each layer
    sizes: list[int]  # elements of each layer

    def flat(self, column: int) -> Tensor:
        """The arrays of a column, one after the other."""
        arrays = self.columns[column]
        assert arrays is not None
        return arrays[0].flatten() if len(arrays) == 1 else torch.cat([*map(torch.flatten, arrays)])

    def views(self, flat: Tensor, column: int) -> list[Tensor]:
        """A flat tensor, cut into views shaped like the arrays of a column."""
        arrays = self.columns[column]
        assert arrays is not None
        return list(map(Tensor.view_as, flat.split_with_sizes(self.sizes), arrays))

    def write(self, column: int, flat: Tensor) -> None:
        """Copies a flat tensor to the arrays of a column."""
        torch._foreach_copy_(self.columns[column], self.views(flat, column))  # type: ignore[arg-type]

    def spread(self, values: Tensor) -> Tensor:
        """One value for each layer, repeated for each of its elements."""
        if len(self.sizes) == 1:
            return values[0]
        return torch.cat([*map(Tensor.expand, values.unbind(), self.sizes)])

    def spread_value(self, which: int, like: Tensor) -> Tensor | float:
        """A number of each layer, repeated for each of its elements; one if all are equal."""
        values = [pair[which] for pair in self.layer_values]
        return values[0] if len(set(values)) == 1 else self.spread(like.new_tensor(values))

    def sums(self, *flats: Tensor) -> Tensor:
        """The sum over each layer of each flat tensor, none negative: (layers, tensors)."""
        if flats[0].is_cpu:  # where a norm in a wider type takes seven times as long
            sums = torch.stack([part.sum() for part in self._parts(flats)])
            return sums.to(widest_float(sums.device)).view(len(flats), -1).T
        return self._norms(flats, 1)

    def squares(self, *flats: Tensor) -> Tensor:
        """|x|^2 of each layer, for each flat tensor x: (layers, tensors)."""
        return self._norms(flats, 2).square_()

    def _norms(self, flats: Sequence[Tensor], order: int) -> Tensor:
        norms = torch._foreach_norm(self._parts(flats), order, dtype=widest_float(flats[0].device))
        return torch.stack(norms).view(len(flats), -1).T

    def _parts(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [part for flat in flats for part in flat.split_with_sizes(self.sizes)]


@dataclass(frozen=True)
class TwoPass:
    """A rule over layers, both as a kernel and as functions of a chunk."""

    rule: native.Rule  # the kernel
    columns: Sequence[native.Column]  # the arrays of each layer, in the kernel's order
    layer_values: Sequence[tuple[float, float]]  # two numbers for each layer
    group_values: Sequence[float]  # the numbers that all layers share
    first_pass: Callable[[Chunk], Tensor]  # returns the sums of each layer, (layers, 2)
    second_pass: Callable[[Chunk, Tensor], Tensor | None]  # with them; may return statistics
    watch: bool = False  # whether kernels return statistics

    def run(self, *, fused: bool, all_reduce: AllReduce | None) -> Tensor:
        """Runs both passes, by kernels where `fused` allows and they fit.

        `all_reduce` sums (layers, 2) values over the ranks that have the rest of the layers, in
        place. Returns the statistics of each layer, (layers, 5); zeros if not watched.
        """
        whole = Chunk(self.columns, slice(None), self.layer_values, [])
        fits = fused and native.fits(*self.columns)
        if fits and all_reduce is None:
            return self._kernel(whole, native.Passes.BOTH)[1]
        some = [whole] if fits else chunks(self.columns, self.layer_values)
        parts = [(chunk, fits or (fused and native.fits(*chunk.columns))) for chunk in some]
        sums = self._pass(parts, None)
        if all_reduce is not None:
            all_reduce(sums)
        return self._pass(parts, sums)

    def _pass(self, parts: Sequence[tuple[Chunk, bool]], sums: Tensor | None) -> Tensor:
        """The first pass, which returns its sums, or the second, which returns statistics."""
        first: Any = self.columns[0]
        device = first[0].device if first else torch.device("cpu")
        shape = len(first), 2 if sums is None else 5
        rows = torch.zeros(shape, dtype=widest_float(device), device=device)
        for chunk, by_kernel in parts:
            of_layers = None if sums is None else sums[chunk.layers]
            found: Tensor | None
            if by_kernel:
                which = native.Passes.FIRST if sums is None else native.Passes.SECOND
                found = self._kernel(chunk, which, of_layers)[sums is not None]
            elif of_layers is None:
                found = self.first_pass(chunk)
            else:
                found = self.second_pass(chunk, of_layers)
            if found is not None:
                rows[chunk.layers] += found
        return rows

    def _kernel(
        self, chunk: Chunk, passes: native.Passes, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        columns, own = chunk.columns, itertools.chain.from_iterable(chunk.layer_values)
        shared, watch = self.group_values, self.watch
        return native.run(self.rule, columns, shared, own, passes=passes, sums=sums, watch=watch)


def chunks(
    columns: Sequence[native.Column], layer_values: Sequence[tuple[float, float]] = ()
) -> Iterator[Chunk]:
    """Layers of one device and type together, up to a size; large ones of a CPU in parts."""
    first: Any = columns[0]
    shapes = list(map(_SHAPE, first))
    if any(list(map(_SHAPE, column or first)) != shapes for column in columns):
        raise StateError(
            "a parameter, its gradient and its state have different shapes; load the state of "
            "the same parameters, or none"
        )

    def whole(layers: slice) -> Chunk:
        arrays = [None if c is None else c[layers] for c in columns]
        return Chunk(arrays, layers, layer_values[layers], list(map(Tensor.numel, first[layers])))

    start, elements, limit = 0, 0, 0
    for number, array in enumerate(first):
        size, unlike = array.numel(), number and _SIGNATURE(array) != _SIGNATURE(first[start])
        if number > start and (unlike or elements + size > limit):
            yield whole(slice(start, number))
            start, elements = number, 0
        limit = _ON_CPU if array.is_cpu else _ON_DEVICE
        elements += size
        if size > limit and all(c[number].is_contiguous() for c in columns if c is not None):
            yield from _parts(whole(slice(number, number + 1)), limit)
            start, elements = number + 1, 0
    if start < len(first):
        yield whole(slice(start, len(first)))


def _parts(layer: Chunk, limit: int) -> Iterator[Chunk]:
    """A layer, whose arrays are contiguous, in parts of so many elements."""
    flats = [None if c is None else c[0].view(-1) for c in layer.columns]
    for at in range(0, layer.sizes[0], limit):
        columns = [None if flat is None else [flat[at : at + limit]] for flat in flats]
        yield replace(layer, columns=columns, sizes=[min(limit, layer.sizes[0] - at)])


def require_kernels(fused: bool | None) -> None:
    """Raises SettingError if fused=True and the kernels were not built."""
    if fused and native.library() is None:
        raise SettingError(
            "fused=True, and no kernels were built when bigbatch was installed; install it "
            "again where there is a C compiler, or leave fused out"
        )
