"""What r did to each layer, kept on the device until somebody reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerGsnr:
    """What one step's r was, by layer; nothing waits for the device until a number is read.

    Args:
        names: of the layers: parameter names where the optimizer was given them, else numbers.
        elements: of each layer, over all ranks.
        rows: (layers, 5), of `apply_gsnr`: the sum of r, elements at gamma, elements at r_max,
            |g|^2 and |p_hat g|^2.
        k: micro-batches of the step.
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
        """Share of its elements that the lower clip holds, in [0, 1]."""
        return self._share(1)

    @property
    def at_r_max(self) -> Tensor:
        """Share of its elements that the upper clip holds, in [0, 1]."""
        return self._share(2)

    @property
    def lr_factor(self) -> Tensor:
        """How much shorter or longer its gradient became: |r g| / |g|, p_hat for r with beta3.

        nan where the gradient is 0.
        """
        return (self.rows[:, 4] / self.rows[:, 3]).sqrt()

    def by_layer(self) -> dict[str, list[float]]:
        """Name -> [mean r, share at gamma, share at r_max, lr factor]; one wait for the device."""
        columns = [self.mean, self.at_gamma, self.at_r_max, self.lr_factor]
        return dict(zip(self.names, torch.stack(columns, dim=1).tolist(), strict=True))

    def _share(self, column: int) -> Tensor:
        return self.rows[:, column] / self.rows.new_tensor(self.elements).clamp_min_(1)
