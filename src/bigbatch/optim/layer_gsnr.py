"""The effect of r on each layer, kept on the device until it is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerGsnr:
    """r of one step, by layer; only reading a number waits for the device.

    Args:
        names: names of the layers: parameter names if the optimizer was given them, else numbers.
        elements: number of elements of each layer, over all ranks.
        rows: (layers, 5), from `apply_gsnr`: the sum of r, elements at gamma, elements at r_max,
            |g|^2 and |p_hat g|^2.
        k: number of micro-batches in the step.
    """

    names: Sequence[str]
    elements: Sequence[int]
    rows: Tensor
    k: int

    @property
    def mean(self) -> Tensor:
        """Mean r of each layer, (layers,)."""
        return self._share(0)

    @property
    def at_gamma(self) -> Tensor:
        """Share of each layer's elements at the lower clip, in [0, 1]."""
        return self._share(1)

    @property
    def at_r_max(self) -> Tensor:
        """Share of each layer's elements at the upper clip, in [0, 1]."""
        return self._share(2)

    @property
    def lr_factor(self) -> Tensor:
        """Change of each layer's gradient norm, |r g| / |g|, with beta3 |p_hat g| / |g|.

        nan if the gradient is 0.
        """
        return (self.rows[:, 4] / self.rows[:, 3]).sqrt()

    def by_layer(self) -> dict[str, list[float]]:
        """Name -> [mean r, share at gamma, share at r_max, lr factor]; one wait for the device."""
        columns = [self.mean, self.at_gamma, self.at_r_max, self.lr_factor]
        return dict(zip(self.names, torch.stack(columns, dim=1).tolist(), strict=True))

    def _share(self, column: int) -> Tensor:
        return self.rows[:, column] / self.rows.new_tensor(self.elements).clamp_min_(1)
