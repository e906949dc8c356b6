"""Inner products of the gradients of groups of samples in one backward."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.gradients import GroupGradients, Subscriber
from bigbatch.gradients.dtypes import to_device, widest_float

_MAX_SMALL_ELEMENTS = 1 << 17  # elements that are gathered, few enough to stay in cache


class GroupScatter(Subscriber):
    """Subscriber of a source: h_d . h_e for all groups d, e of each backward, by layer.

    Large images are multiplied at once, small ones are gathered first. From these products follows
    what the groups add to the scatter of their backward's gradient H = sum h_d:

        sum_d |h_d|^2 / n_d - |H|^2 / N

    Args:
        layers: the number of each parameter's layer, from 0; empty if all are one layer.
        needs_exact_groups: whether each layer's products must be exact.
    """

    def __init__(self, layers: Mapping[Tensor, int], *, needs_exact_groups: bool = False) -> None:
        self.needs_exact_groups = needs_exact_groups
        self._layers = layers
        self._products: list[list[Tensor] | None] = []  # of each backward, by layer (k, k)
        self._small: dict[int, list[Tensor]] = {}
        self._small_elements = 0

    def begin(self) -> None:
        """A step starts."""
        self._products.clear()

    def micro_batch(self, weight: float, groups: int) -> None:
        """A backward of so many groups starts."""
        self._products.append(None)
        self._small.clear()
        self._small_elements = 0

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Nothing to do: the groups follow."""

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Multiplies the images with each other, now or at the end of the backward."""
        layer = self._layers.get(parameter, 0)
        images = groups.images.flatten(1)
        if groups.columns > 1:
            images = images * groups.columns**-0.5
        if images.numel() > _MAX_SMALL_ELEMENTS:
            self._add(layer, images)
            return
        self._small.setdefault(layer, []).append(images)
        self._small_elements += images.numel()
        if self._small_elements > _MAX_SMALL_ELEMENTS:
            self._multiply_small()

    def end(self) -> None:
        """The backward is complete."""
        self._multiply_small()

    def within(self, weights: Sequence[Sequence[float]], device: torch.device) -> Tensor:
        """What groups add to sum |h_d|^2 / n_d of the backwards, by layer (L,).

        Args:
            weights: n_d of the groups, for each backward.
            device: device of the result.
        """
        dtype = widest_float(device)
        total = torch.zeros(self._count, dtype=dtype, device=device)
        for products, sizes in zip(self._products, weights, strict=True):
            if products is None or len(sizes) < 2:
                continue
            n = torch.tensor(sizes, dtype=dtype, device="cpu")
            # the factors of h_d . h_e; a group of weight 0 has no gradient
            factors = torch.diag(torch.where(n > 0, 1 / n, 0)) - 1 / n.sum()
            stacked = torch.stack([to_device(p, device, dtype) for p in products])
            total += (stacked * to_device(factors, device)).sum((1, 2))
        return total

    @property
    def _count(self) -> int:
        return 1 + max(self._layers.values(), default=0)

    def _multiply_small(self) -> None:
        for layer, images in self._small.items():
            self._add(layer, images[0] if len(images) == 1 else torch.cat(images, 1))
        self._small.clear()
        self._small_elements = 0

    def _add(self, layer: int, images: Tensor) -> None:
        product = images @ images.t()
        products = self._products[-1]
        if products is None:
            products = self._products[-1] = [torch.zeros_like(product) for _ in range(self._count)]
        products[layer] += product
