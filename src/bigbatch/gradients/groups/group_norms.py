"""Squared norms of the groups' gradients in one backward, and whether they add up to it.

See [Note: Groups of one backward] in `group_tap.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import to_device, widest_float
from bigbatch.gradients.groups.grouping import joined

_MAX_GATHERED = 1 << 17  # elements that are gathered, few enough to stay in cache
_ROUNDINGS = 64  # of the length of all gradients, that the error of one may have


@dataclass
class GroupNorms:
    """Sums over the parameters of a backward; a layer is a number, from 0."""

    weights: tuple[float, ...]  # n_d of the groups
    squares: dict[int, Tensor] = field(default_factory=dict)  # |h_d|^2, by layer (k,)
    totals: dict[int, Tensor] = field(default_factory=dict)  # |sum of h_d|^2, by layer
    # the squared length of (sum of h_d) - h, by part: a layer, or a parameter
    errors: dict[int, Tensor] = field(default_factory=dict)
    lengths: dict[int, Tensor] = field(default_factory=dict)  # sum |h_d|^2, by part
    eps: float = 0.0  # relative rounding of the coarsest dtype in which the backward computed them
    products: Tensor | None = None  # <h_d, h_e> of all groups, (k, k), if they are wanted

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

        The largest over the parts and all of them together. A part may be nothing but rounding, as
        the key's bias of attention: only an error that all parts together would show counts there.
        It is also 0 if they were not compared.
        """
        if not self.errors:
            return torch.zeros(())
        device = next(iter(self.errors.values())).device
        errors, lengths = (
            torch.stack([to_device(x, device) for x in parts.values()])
            for parts in (self.errors, self.lengths)
        )
        tiny = torch.finfo(lengths.dtype).tiny
        total = lengths.sum().clamp_min(tiny)
        is_large = errors > (_ROUNDINGS * self.eps) ** 2 * total
        relative = torch.where(is_large, errors / lengths.clamp_min(tiny), 0.0)
        error = torch.maximum(relative.max(), errors.sum() / total).sqrt()
        return torch.where(error > math.sqrt(self.eps), error, 0.0)


def refusal_of_sums(error: float) -> str:
    """What a relative error of the sums of groups means; empty if there is none.

    An error that is not finite is that of a gradient, which skips the step.
    """
    if not error or not math.isfinite(error):
        return ""
    return (
        "the gradients of the groups of one backward do not add up to a parameter's gradient (they "
        f"differ by {error:.2g} of their length): it is used in a way that was not seen, in a "
        "second forward for example, or a hook changes it"
    )


class NormsOfGroups:
    """Adds up `GroupNorms`. Large images are read at once, small ones are read together."""

    def __init__(
        self,
        weights: tuple[float, ...],
        layers: Mapping[Tensor, int],
        eps: float,
        *,
        by_parameter: bool,
        with_products: bool = False,
    ) -> None:
        self._with_products = with_products
        self.norms = GroupNorms(weights, eps=eps)
        self._layers, self._by_parameter = layers, by_parameter
        self._gathered: dict[tuple[int, int], list[_Images]] = {}
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
        layer = self._layers.get(parameter, 0) if self._layers else 0
        if images.dim() != 2:
            images = images.reshape(len(images), -1)  # (k,) of a parameter that is one number
        if expected is not None:
            expected = expected.flatten()
        added = _Images(id(parameter) if self._by_parameter else layer, images, expected)
        if images.numel() > _MAX_GATHERED:
            self._read(layer, scale, [added])
            return
        self._gathered.setdefault((layer, scale), []).append(added)
        self._elements += images.numel()
        if self._elements > _MAX_GATHERED:
            self.end()

    def end(self) -> GroupNorms:
        """Reads what is gathered; the sums so far."""
        for key, gathered in self._gathered.items():
            self._read(*key, gathered)
        self._gathered.clear()
        self._elements = 0
        return self.norms

    def _read(self, layer: int, scale: int, gathered: "Sequence[_Images]") -> None:
        norms, images = self.norms, joined([one.images for one in gathered], -1)
        total = images.sum(0)
        if images.numel() > 2 * _MAX_GATHERED:  # where vector_norm is inexact
            squares = torch.stack([torch.dot(image, image) for image in images])
        else:
            squares = torch.linalg.vector_norm(images, dim=1).square()
        squared_total = torch.dot(total, total)
        if self._with_products:
            products = (images @ images.t() / scale).cpu()
            norms.products = products if norms.products is None else norms.products + products
        self._compare(gathered, total, squares.sum())
        if scale > 1:
            squares, squared_total = squares / scale, squared_total / scale
        _add(norms.squares, layer, squares)
        _add(norms.totals, layer, squared_total)

    def _compare(self, gathered: "Sequence[_Images]", total: Tensor, length: Tensor) -> None:
        """Compares the sums of groups that were read together, each part by itself."""
        expected = [one.expected for one in gathered if one.expected is not None]
        if not expected:
            return
        difference = total.sub_(joined(expected, -1))
        if len({one.part for one in gathered}) == 1:
            _add(self.norms.errors, gathered[0].part, torch.dot(difference, difference))
            _add(self.norms.lengths, gathered[0].part, length)
            return
        errors = torch.split(difference, [one.images.shape[1] for one in gathered])
        for one, error in zip(gathered, errors, strict=True):
            _add(self.norms.errors, one.part, torch.dot(error, error))
            _add(self.norms.lengths, one.part, torch.linalg.vector_norm(one.images).square())


class _Images(NamedTuple):
    """Images that wait to be read."""

    part: int  # the layer or the parameter whose sums are compared
    images: Tensor  # those of the groups, (k, n)
    expected: Tensor | None  # the image of their sum, (n,); None if it is not compared


def _add(sums: dict[int, Tensor], key: int, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
