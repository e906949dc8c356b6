"""What a fold did to each layer, kept on the device until somebody reads it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """What one step's r was, by layer; nothing waits for the device until a number is read.

    Args:
        parameters: the layers.
        told: (layers, 5), as `fold` tells: the sum of r, elements at gamma, elements at r_max,
            |g|^2 and |p_hat g|^2.
        k: micro-batches of the step.
    """

    parameters: list[Tensor]
    told: Tensor
    k: int

    @property
    def mean(self) -> Tensor:
        """Mean r of each layer, (layers,)."""
        return self.told[:, 0] / self._elements

    @property
    def at_gamma(self) -> Tensor:
        """Share of its elements that the lower clip holds, in [0, 1]."""
        return self.told[:, 1] / self._elements

    @property
    def at_r_max(self) -> Tensor:
        """Share of its elements that the upper clip holds, in [0, 1]."""
        return self.told[:, 2] / self._elements

    @property
    def lr_factor(self) -> Tensor:
        """How much shorter or longer its gradient became: |r g| / |g|, p_hat for r with beta3."""
        return (self.told[:, 4] / self.told[:, 3]).sqrt()

    @property
    def _elements(self) -> Tensor:
        return self.told.new_tensor([p.numel() for p in self.parameters]).clamp_min_(1)
