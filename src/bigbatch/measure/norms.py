"""Squared norms: of a gradient, of each micro-batch, of each layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.errors import GradientError


class MicroBatchNorms:
    """Subscriber of a source: |h_d|^2 of each micro-batch, layer by layer where asked for.

    Args:
        layers: the number of each parameter's layer, from 0; none where all are one.
    """

    def __init__(self, layers: Mapping[Tensor, int]) -> None:
        self.squares: list[Tensor] = []  # (L,) each
        self.uneven = False  # whether micro-batches reached different parameters
        self.eps = 0.0  # relative rounding of the coarsest type among the gradients
        self._layers = layers
        self._present: dict[Tensor, Tensor] = {}  # parameter -> |h|^2
        self._reached: set[Tensor] = set()  # by the first micro-batch

    def begin(self) -> None:
        """A step starts."""
        self.squares.clear()
        self.uneven, self.eps = False, 0.0

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""
        self._present.clear()

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reads the gradient once."""
        if parameter in self._present:
            raise GradientError(
                "a parameter received two gradients in one micro-batch; mark the micro-batches "
                "with `with meter.micro_batch():`"
            )
        self._present[parameter] = squared_norm(gradient)
        self.eps = max(self.eps, torch.finfo(gradient.dtype).eps)

    def end(self) -> None:
        """The micro-batch is complete."""
        if not self.squares:
            self._reached = set(self._present)
        self.uneven |= self._present.keys() != self._reached
        self.squares.append(self.by_layer(self._present))

    @property
    def count(self) -> int:
        """L, how many layers there are."""
        return 1 + max(self._layers.values(), default=0)

    def by_layer(self, squares: Mapping[Tensor, Tensor]) -> Tensor:
        """The sum of `squares` over each layer's parameters, (L,)."""
        if not squares:
            return torch.zeros(self.count, dtype=torch.float64)
        values = stacked(list(squares.values()))
        if not self._layers:
            return values.sum().reshape(1)
        places = torch.tensor([self._layers[p] for p in squares], device="cpu")
        places = places.to(values.device, non_blocking=True)
        return values.new_zeros(self.count).index_add_(0, places, values)


def squared_norm(gradient: Tensor) -> Tensor:
    """|gradient|^2 as a 0-dim tensor; a contiguous gradient is not copied.

    A dot product, because `vector_norm` on a CPU sums 10 M float32 with an error of 4e-4 (dot:
    6e-6; docs/LOG.md). Half types are summed in float32.
    """
    flat = gradient.detach().reshape(-1)
    if flat.dtype in (torch.float32, torch.float64):
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """0-dim tensors as one of the widest float type, on the device of the first."""
    device = scalars[0].device
    if any(s.device != device or s.dtype != scalars[0].dtype for s in scalars):
        scalars = [s.to(device, wide(device), non_blocking=True) for s in scalars]
    return torch.stack(list(scalars)).to(wide(device))


def wide(device: torch.device) -> torch.dtype:
    """The widest float type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
