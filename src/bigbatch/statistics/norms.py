"""Squared norms: of a gradient, of each micro-batch, of each layer."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients import MicroBatchGradients, Subscriber
from bigbatch.gradients.dtypes import FULL_PRECISION, stacked, sum_dtype, to_device, widest_float

_SHORT = 1 << 14  # elements; for fewer, the call costs more than the read
_DTYPE, _IS_CPU = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")
_FULL = frozenset(FULL_PRECISION)


class MicroBatchNorms(Subscriber):
    """Subscriber of a source: |h_d|^2 of each micro-batch, by layer.

    Gradients are read in one call; on a CPU, long ones are read by dot products, one by one.
    """

    def __init__(self, layers: Mapping[Tensor, int]) -> None:
        self._layers = layers
        self._dtypes: set[torch.dtype] = set()
        self._norms: list[Tensor] = []  # |h| of the parameters that the micro-batch reached
        self._parameters: list[Tensor] = []  # these, if there are layers
        self._rows: list[Tensor] = []  # by micro-batch: its norms; or, with layers, (L,) squares

    def begin(self) -> None:
        """A step starts."""
        self._rows.clear()
        self._dtypes.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._norms, self._parameters = [], []

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Reads the gradients once."""
        self._dtypes.update(map(_DTYPE, batch.gradients))
        self._norms += norms(batch.gradients)
        if self._layers:
            self._parameters += batch.parameters

    def end(self) -> None:
        """The micro-batch is complete."""
        row = stacked(self._norms) if self._norms else torch.zeros(0)
        self._rows.append(self._squares_by_layer(row, self._parameters) if self._layers else row)

    @property
    def eps(self) -> float:
        """Relative rounding of the coarsest dtype among the gradients of the step."""
        return max((torch.finfo(dtype).eps for dtype in self._dtypes), default=0.0)

    @property
    def count(self) -> int:
        """L, the number of layers."""
        return 1 + max(self._layers.values(), default=0)

    def squares(self, device: torch.device) -> Tensor:
        """|h_d|^2 of the micro-batches of the step so far, by layer (k, L)."""
        dtype = widest_float(device)
        rows = [to_device(row, device) for row in self._rows]
        if not rows:
            return torch.zeros(0, self.count, dtype=dtype, device=device)
        if self._layers:
            return torch.stack(rows).to(dtype)
        if len({len(row) for row in rows}) > 1:  # some reached fewer parameters
            return torch.stack([_square(row, dtype).sum(0, keepdim=True) for row in rows])
        return _square(torch.stack(rows), dtype).sum(1, keepdim=True)

    @property
    def has_layers(self) -> bool:
        """Whether each layer is measured by itself."""
        return bool(self._layers)

    def by_layer(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Tensor:
        """|gradient|^2, summed by layer (L,); the parameters are needed if there are several."""
        if not gradients:
            return torch.zeros(self.count, dtype=torch.float64)
        row = stacked(norms(gradients))
        if self._layers:
            return self._squares_by_layer(row, parameters)
        return _square(row, widest_float(row.device)).sum(0, keepdim=True)

    def _squares_by_layer(self, row: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        squares = _square(row, widest_float(row.device))
        layer_numbers = torch.tensor([self._layers[p] for p in parameters], dtype=torch.int64)
        layer_numbers = to_device(layer_numbers, row.device)
        return squares.new_zeros(self.count).index_add_(0, layer_numbers, squares)


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """|g| of each gradient, 0-dim; half types are summed in float32.

    On a CPU, `vector_norm` sums 10 M float32 with an error of 4e-4 (a dot product: 1e-5;
    docs/LOG.md), so long gradients have a call each.
    """
    if not all(map(_IS_CPU, gradients)):
        return _foreach_norm(gradients)
    lengths = list(map(Tensor.numel, gradients))
    if max(lengths, default=0) <= _SHORT:
        return _foreach_norm(gradients)
    found: list[Any] = [None] * len(gradients)
    for i, length in enumerate(lengths):
        if length > _SHORT:
            found[i] = squared_norm(gradients[i]).sqrt()
    short = [i for i, length in enumerate(lengths) if length <= _SHORT]
    if short:
        values = _foreach_norm([gradients[i] for i in short])
        for i, value in zip(short, values, strict=True):
            found[i] = value
    return found


def _foreach_norm(gradients: Sequence[Tensor]) -> list[Tensor]:
    dtypes = set(map(_DTYPE, gradients))
    if dtypes <= _FULL:
        return list(torch._foreach_norm(list(gradients)))
    return [torch.linalg.vector_norm(g, dtype=sum_dtype(g.dtype)) for g in gradients]


def _square(norms: Tensor, dtype: torch.dtype) -> Tensor:
    return norms.to(dtype).square_() if norms.dtype != dtype else norms.square()


def squared_norm(gradient: Tensor) -> Tensor:
    """|gradient|^2 as a 0-dim tensor; a dense gradient is not copied.

    A dot product, because `vector_norm` on a CPU sums 10 M float32 with an error of 4e-4 (dot:
    1e-5; docs/LOG.md). Half types are summed in float32.
    """
    flat = flattened(gradient, gradient.stride())
    if flat.dtype in FULL_PRECISION:
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def flattened(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A flat view in the order of these strides; a copy only if the tensor is not dense in it."""
    if all(s >= t for s, t in itertools.pairwise(strides)):
        return tensor.reshape(-1)
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1)
