"""Squared norms of the groups' gradients in one backward, and whether they add up to it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import to_device, widest_float
from bigbatch.gradients.groups.grouping import joined

_MAX_GATHERED = 1 << 17  # elements that are gathered, few enough to stay in cache
_ROUNDINGS = 64  # of the length of all gradients, that the error of one may have

_Images = tuple[Tensor, Tensor | None]
"""Images of the groups' gradients (k, n); the image of their sum (n,), None if not compared."""


class GroupNorms:
    """Sums over the parameters of a backward, by layer; small images are read together."""

    def __init__(
        self,
        weights: tuple[float, ...],  # n_d of the groups
        layers: Mapping[Tensor, int],  # of each parameter; empty if all are one
        eps: float,  # relative rounding of the coarsest dtype in which the backward computed them
        *,
        by_parameter: bool,  # whether each parameter is read, and its sum compared, by itself
        with_products: bool = False,  # whether the products of the groups are wanted
    ) -> None:
        self.weights, self._layers, self._eps = weights, layers, eps
        self._by_parameter, self._with_products = by_parameter, with_products
        self.products: Tensor | None = None  # <h_d, h_e> of all groups, (k, k)
        self._gathered: dict[tuple[int, int], list[_Images]] = {}
        self._elements = 0
        # by layer: |h_d|^2 of each group, |sum of h_d|^2, and |(sum of h_d) - h|^2, (k + 2,); each
        # row has what was read together
        self._rows: list[tuple[int, Tensor]] = []
        self._compares = False

    def add(
        self,
        parameter: Tensor,  # chooses the layer
        images: Tensor,  # linear images of the groups' gradients (k, ...)
        scale: int,  # c, with |h_d|^2 = E |image of h_d|^2 / c
        expected: Tensor | None = None,  # that of their sum, if they are compared, all or none
    ) -> None:
        """Adds a parameter."""
        key = self._layers.get(parameter, 0) if self._layers else 0, scale
        if images.dim() != 2:
            images = images.reshape(images.shape[0], -1)  # (k,) of a parameter that is one number
        added = images, None if expected is None else expected.flatten()
        elements = images.numel()
        if self._by_parameter or elements > _MAX_GATHERED:  # also where none is compared
            self._read(*key, [added])
            return
        self._gathered.setdefault(key, []).append(added)
        self._elements += elements
        if self._elements > _MAX_GATHERED:
            self.end()

    def end(self) -> None:
        """Reads what is gathered."""
        for key, gathered in self._gathered.items():
            self._read(*key, gathered)
        self._gathered, self._elements = {}, 0

    def _read(self, layer: int, scale: int, gathered: Sequence[_Images]) -> None:
        images = joined([one for one, _ in gathered], -1)
        total = images.sum(0)
        if images.numel() > 2 * _MAX_GATHERED:  # where vector_norm is inexact
            squares = torch.stack([torch.dot(image, image) for image in images])
        else:
            squares = torch.linalg.vector_norm(images, dim=1).square()
        if self._with_products:
            products = (images @ images.t() / scale).cpu()
            self.products = products if self.products is None else self.products + products
        lengths = [torch.dot(total, total)]
        if expected := [one for _, one in gathered if one is not None]:
            error = total.sub_(joined(expected, -1))
            lengths.append(torch.dot(error, error))
            self._compares = True
        row = torch.cat([squares, torch.stack(lengths)])
        self._rows.append((layer, row / scale if scale > 1 else row))

    def _stacked(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.stack([to_device(row, device, dtype) for _, row in self._rows])

    def scatter(self, layers: int, device: torch.device) -> Tensor:
        """sum_d |h_d|^2 / n_d - |sum h_d|^2 / sum n_d, by layer (L,)."""
        dtype = widest_float(device)
        if not self._rows:
            return torch.zeros(layers, dtype=dtype, device=device)
        inverse = [1 / n if n else 0.0 for n in self.weights]
        factors = torch.tensor([*inverse, -1 / sum(self.weights)], dtype=dtype, device="cpu")
        rows = self._stacked(device, dtype)[:, : len(inverse) + 1]
        by_row = rows @ to_device(factors, device)
        if layers == 1:
            return by_row.sum(0, keepdim=True)
        numbers = torch.tensor([layer for layer, _ in self._rows], device="cpu")
        return by_row.new_zeros(layers).index_add_(0, to_device(numbers, device), by_row)

    def relative_error(self, like: Tensor) -> Tensor | None:
        """The length of (sum of h_d) - h over that of all h_d; None if they were not compared.

        The largest over what was read together, and of all; 0 if it is not more than rounding.
        """
        if not self._compares:
            return None
        rows = self._stacked(like.device, like.dtype)
        errors, lengths = rows[:, -1], rows[:, :-2].sum(1)
        tiny = torch.finfo(like.dtype).tiny
        total = lengths.sum().clamp_min(tiny)
        # where a part is all rounding, as the key's bias of attention, only an error of all counts
        is_large = errors > (_ROUNDINGS * self._eps) ** 2 * total
        relative = torch.where(is_large, errors / lengths.clamp_min(tiny), 0.0)
        error = torch.maximum(relative.max(), errors.sum() / total).sqrt()
        return torch.where(error > math.sqrt(self._eps), error, 0.0)


def refusal_of_sums(error: float) -> str:
    """What a relative error of the sums of groups means; empty if there is none."""
    if not error or not math.isfinite(error):  # of a gradient, which skips the step
        return ""
    return (
        "the gradients of the groups of one backward do not add up to a parameter's gradient (they "
        f"differ by {error:.2g} of their length): it is used in a way that was not seen, in a "
        "second forward for example, or a hook changes it"
    )
