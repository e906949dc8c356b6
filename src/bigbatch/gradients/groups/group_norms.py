"""Squared norms of the groups' gradients in one backward, and whether they add up to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import to_device, widest_float

_MAX_GATHERED = 1 << 17  # elements that are gathered, few enough to stay in cache


@dataclass
class GroupNorms:
    """Sums over the parameters of a backward; a layer is a number, from 0.

    Args:
        weights: n_d of the groups.
        squares: |h_d|^2, by layer (k,).
        totals: |sum of h_d|^2, by layer.
        error: the squared length of (sum of h_d) - h, over all parameters.
        length: sum |h_d|^2, over all parameters.
        eps: relative rounding of the coarsest dtype in which the backward computed them.
    """

    weights: tuple[float, ...]
    squares: dict[int, Tensor] = field(default_factory=dict)
    totals: dict[int, Tensor] = field(default_factory=dict)
    error: Tensor | float = 0.0
    length: Tensor | float = 0.0
    eps: float = 0.0

    def scatter(self, layers: int, device: torch.device) -> Tensor:
        """sum_d |h_d|^2 / n_d - |sum h_d|^2 / sum n_d, by layer (L,)."""
        dtype = widest_float(device)
        inverse = torch.tensor([1 / n if n else 0.0 for n in self.weights], dtype=dtype)
        result = torch.zeros(layers, dtype=dtype, device=device)
        for layer, squares in self.squares.items():
            within = to_device(squares, device, dtype) @ to_device(inverse, device)
            total = to_device(self.totals[layer], device, dtype)
            result[layer] = within - total / sum(self.weights)
        return result

    def relative_error(self) -> Tensor:
        """The length of (sum of h_d) - h over that of all h_d; 0 if it is not more than rounding.

        It is also 0 if they were not compared.
        """
        length = torch.as_tensor(self.length)
        error = (self.error / length.clamp_min(torch.finfo(length.dtype).tiny)).sqrt()
        return torch.where(error > math.sqrt(self.eps), error, 0.0)


class NormsOfGroups:
    """Adds up `GroupNorms`. Large images are read at once, small ones are read together.

    Args:
        weights: n_d of the groups.
        layers: the number of each parameter's layer; empty if all are one layer.
        eps: relative rounding of the backward.
    """

    def __init__(
        self, weights: tuple[float, ...], layers: Mapping[Tensor, int], eps: float
    ) -> None:
        self.norms = GroupNorms(weights, eps=eps)
        self._layers = layers
        self._gathered: dict[tuple[int, int], list[Tensor]] = {}
        self._gathered_sums: dict[tuple[int, int], list[Tensor]] = {}
        self._elements = 0

    def add(
        self, parameter: Tensor, images: Tensor, scale: int, expected: Tensor | None = None
    ) -> None:
        """Adds a parameter.

        Args:
            parameter: chooses the layer.
            images: linear images of the groups' gradients (k, ...).
            scale: c, with |h_d|^2 = E |image of h_d|^2 / c.
            expected: the image of their sum, if it is compared: for all parameters or for none.
        """
        key, size = (self._layers.get(parameter, 0) if self._layers else 0, scale), images.numel()
        if images.dim() != 2:
            images = images.reshape(len(images), -1)  # (k,) of a parameter that is one number
        if size > _MAX_GATHERED:
            self._read(key, images, None if expected is None else expected.flatten())
            return
        self._gathered.setdefault(key, []).append(images)
        if expected is not None:
            self._gathered_sums.setdefault(key, []).append(expected.flatten())
        self._elements += size
        if self._elements > _MAX_GATHERED:
            self.end()

    def end(self) -> GroupNorms:
        """Reads what is gathered; the sums so far."""
        for key, images in self._gathered.items():
            sums = self._gathered_sums.get(key)
            self._read(key, torch.cat(images, 1), None if sums is None else torch.cat(sums))
        self._gathered.clear()
        self._gathered_sums.clear()
        self._elements = 0
        return self.norms

    def _read(self, key: tuple[int, int], images: Tensor, expected: Tensor | None) -> None:
        (layer, scale), norms = key, self.norms
        total = images.sum(0)
        if images.numel() > 2 * _MAX_GATHERED:  # where vector_norm is inexact
            squares = torch.stack([torch.dot(image, image) for image in images])
        else:
            squares = torch.linalg.vector_norm(images, dim=1).square()
        squared_total = torch.dot(total, total)
        if expected is not None:
            difference = total.sub_(expected)
            norms.error = norms.error + torch.dot(difference, difference)
            norms.length = norms.length + squares.sum()
        if scale > 1:
            squares, squared_total = squares / scale, squared_total / scale
        if layer in norms.squares:
            squares = squares + norms.squares[layer]
            squared_total = squared_total + norms.totals[layer]
        norms.squares[layer], norms.totals[layer] = squares, squared_total
