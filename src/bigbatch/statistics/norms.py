"""Squared norms: of a gradient, of each micro-batch, of each layer."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import Subscriber
from bigbatch.gradients.dtypes import FULL_PRECISION, stack_scalars, sum_scalars, to_device

_SMALL = 1 << 14  # elements; for fewer, the call costs more than the read
_MAX_SMALL_ELEMENTS = 1 << 17  # elements that are gathered, few enough to stay in cache


class MicroBatchNorms(Subscriber):
    """Subscriber of a source: |h_d|^2 of each micro-batch, by layer.

    Large gradients are read at once, from cache. Small ones are gathered and read together, but
    only on a CPU, where all hooks run in one thread and one stream.
    """

    def __init__(self, layers: Mapping[Tensor, int]) -> None:
        self.squares: list[Tensor] = []  # |h_d|^2, (L,) each
        self._dtypes: set[torch.dtype] = set()
        self._layers = layers
        self._sqnorms: dict[Tensor, Tensor] = {}  # parameter -> |h|^2
        self._small: dict[Tensor, Tensor] = {}  # parameter -> h, not read yet
        self._small_elements = 0  # number of elements in `_small`

    def begin(self) -> None:
        """A step starts."""
        self.squares.clear()
        self._dtypes.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._sqnorms.clear()
        self._small.clear()
        self._small_elements = 0

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reads the gradient once, now or at the end of the micro-batch."""
        if parameter in self._sqnorms or parameter in self._small:
            raise GradientError(
                "a parameter received two gradients in one micro-batch (reentrant checkpointing, "
                "which use_reentrant=False avoids?); mark the micro-batches with "
                "`with meter.micro_batch():`"
            )
        self._dtypes.add(gradient.dtype)
        size = gradient.numel()
        if size > _SMALL or gradient.dtype not in FULL_PRECISION or not gradient.is_cpu:
            self._sqnorms[parameter] = squared_norm(gradient)
            return
        self._small[parameter] = gradient  # not detached: torch would write into its memory
        self._small_elements += size
        if self._small_elements > _MAX_SMALL_ELEMENTS:
            self._read_small()

    def end(self) -> None:
        """The micro-batch is complete."""
        self._read_small()
        self.squares.append(self.by_layer(self._sqnorms))

    @property
    def eps(self) -> float:
        """Relative rounding of the coarsest dtype among the gradients of the step."""
        return max((torch.finfo(dtype).eps for dtype in self._dtypes), default=0.0)

    @property
    def count(self) -> int:
        """L, the number of layers."""
        return 1 + max(self._layers.values(), default=0)

    def by_layer(self, squares: Mapping[Tensor, Tensor]) -> Tensor:
        """The sum of `squares` over each layer's parameters, (L,)."""
        if not squares:
            return torch.zeros(self.count, dtype=torch.float64)
        if not self._layers:
            return sum_scalars(list(squares.values()))
        values = stack_scalars(list(squares.values()))
        layer_numbers = torch.tensor([self._layers[p] for p in squares], device="cpu")
        layer_numbers = to_device(layer_numbers, values.device)
        return values.new_zeros(self.count).index_add_(0, layer_numbers, values)

    def _read_small(self) -> None:
        self._sqnorms.update(_small_sqnorms(self._small))
        self._small.clear()
        self._small_elements = 0


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


def squared_norms(gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Parameter -> |gradient|^2; small ones are read in one call."""
    small = {
        p: gradient
        for p, gradient in gradients.items()
        if gradient.numel() <= _SMALL and gradient.dtype in FULL_PRECISION
    }
    large = {p: squared_norm(g) for p, g in gradients.items() if p not in small}
    return large | _small_sqnorms(small)


def _small_sqnorms(gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    if not gradients:
        return {}
    norms = torch._foreach_norm(list(gradients.values()))
    torch._foreach_mul_(norms, norms)
    return dict(zip(gradients, norms, strict=True))


def flattened(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A flat view in the order of these strides; a copy only if the tensor is not dense in it."""
    if all(s >= t for s, t in itertools.pairwise(strides)):
        return tensor.reshape(-1)
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1)
