"""Squared norms: of a gradient, of each micro-batch, of each cluster of them, of each layer."""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.gradients import MicroBatchGradients, Subscriber
from bigbatch.gradients.dtypes import (
    FULL_PRECISION,
    stack_scalars,
    sum_dtype,
    to_device,
    widest_float,
)
from bigbatch.gradients.groups.grouping import joined
from bigbatch.kernels import native

_SHORT = 1 << 14  # elements; for fewer, the call costs more than the read
_DTYPE, _IS_CPU = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")
_FULL, _numel = frozenset(FULL_PRECISION), Tensor.numel

HALF_TYPES = torch.bfloat16, torch.float16  # coarsest first


class MicroBatchNorms(Subscriber):
    """Subscriber of a source: |h_d|^2 of each micro-batch, by layer."""

    def __init__(self, layers: Mapping[Tensor, int]) -> None:
        self._layers = layers
        self._dtypes: set[torch.dtype] = set()
        # of each open micro-batch: squares of the parameters that it reached, and these
        self._open: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._rows: list[Tensor] = []  # |h_d|^2 of the complete micro-batches, (L,)

    def begin(self) -> None:
        """A step starts."""
        self._rows.clear()
        self._dtypes.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._open[self.number] = [], []

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Reads the gradients once."""
        self._dtypes.update(map(_DTYPE, batch.gradients))
        squares, parameters = self._open[self.number]
        squares.append(squared_norms(batch.gradients))
        parameters += batch.parameters

    def end(self) -> None:
        """The micro-batch is complete."""
        self._rows.append(sum_by_layer(*self._open[self.number], self._layers))

    @property
    def half_types(self) -> list[bool]:
        """Which of HALF_TYPES are among the gradients of the step on this process."""
        return [dtype in self._dtypes for dtype in HALF_TYPES]

    def squares(self, device: torch.device) -> Tensor:
        """|h_d|^2 of the micro-batches of the step so far, by layer (k, L)."""
        dtype = widest_float(device)
        if not self._rows:
            return torch.zeros(0, count_layers(self._layers), dtype=dtype, device=device)
        return torch.stack([to_device(row, device, dtype) for row in self._rows])


class ClusterNorms(Subscriber):
    """Subscriber of a source: |H_c|^2 of each `parts` consecutive micro-batches, by layer.

    Their sum H_c is one more copy of the gradient on each rank. Each micro-batch is added to it, 12
    bytes for each float32 element, and H_c is read once.
    """

    def __init__(self, layers: Mapping[Tensor, int], parts: int) -> None:
        self.parts = parts
        self._norms = MicroBatchNorms(layers)
        self._sums: dict[Tensor, Tensor] = {}  # of the cluster so far
        self._count = 0  # complete micro-batches of the step

    def begin(self) -> None:
        """A step starts."""
        self._norms.begin()
        self._sums, self._count = {}, 0

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Adds the gradients to the sum of their cluster."""
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            total = self._sums.get(parameter)
            if total is None:
                self._sums[parameter] = gradient.to(sum_dtype(gradient.dtype), copy=True)
            else:
                total.add_(gradient)

    def end(self) -> None:
        """The micro-batch is complete, and with the last of its cluster the cluster."""
        self._count += 1
        if self._count % self.parts:
            return
        self._norms.micro_batch(1.0)
        if self._sums:
            self._norms.gradients(MicroBatchGradients([*self._sums], [*self._sums.values()]))
        self._norms.end()
        self._sums = {}

    def squares(self, device: torch.device) -> Tensor:
        """|H_c|^2 of the complete clusters of the step so far, by layer (P, L)."""
        return self._norms.squares(device)


def count_layers(layers: Mapping[Tensor, int]) -> int:
    """L, the number of layers; one if there are none."""
    return 1 + max(layers.values(), default=0)


def sum_by_layer(
    squares: Sequence[Tensor], parameters: Iterable[Tensor], layers: Mapping[Tensor, int]
) -> Tensor:
    """Sums the squared norms of the parameters' gradients, which come in parts, by layer (L,)."""
    if not squares:
        return torch.zeros(count_layers(layers), dtype=torch.float64)
    device = squares[0].device
    values = joined([to_device(part, device) for part in squares])
    if not layers:
        return values.sum(0, keepdim=True)
    numbers = torch.tensor([layers[p] for p in parameters], device="cpu")
    zeros = values.new_zeros(count_layers(layers))
    return zeros.index_add_(0, to_device(numbers, device), values)


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """|g|^2 of each gradient, (T,), in the widest float; half types are summed in float32."""
    if native.fits(gradients):
        return native.squared_norms(gradients)
    if max(map(_numel, gradients)) > _SHORT and all(map(_IS_CPU, gradients)):
        return stack_scalars([squared_norm(gradient) for gradient in gradients])
    dtypes = set(map(_DTYPE, gradients))
    half_in = torch.float64 if torch.float64 in dtypes else torch.float32
    dtype = None if dtypes <= _FULL else half_in
    return stack_scalars(torch._foreach_norm(list(gradients), 2, dtype)).square()


def squared_norm(gradient: Tensor) -> Tensor:
    """|gradient|^2 as a 0-dim tensor; a dense gradient is not copied."""
    flat = flattened(gradient, gradient.stride())
    if flat.dtype in FULL_PRECISION:  # vector_norm has an error of 4e-4 for 10 M float32 on a CPU
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def flattened(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A flat view in the order of these strides; a copy only if the tensor is not dense in it."""
    if all(s >= t for s, t in itertools.pairwise(strides)):
        return tensor.reshape(-1)
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1)
