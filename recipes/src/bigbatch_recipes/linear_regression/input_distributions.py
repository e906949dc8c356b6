"""Distributions of the inputs; the paper does not name them, so they and the rates are ours."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

INPUTS = 10


@dataclass(frozen=True)
class InputDistribution:
    """Independent inputs x_i of one shape, each with its own mean and standard deviation.

    Args:
        name: its name in tables and figures.
        uniform: whether draws are uniform; they are normal otherwise.
        mean: mean of every input.
        std: standard deviation of each input.
        lrs: learning rates to compare at.
        shown: the learning rate that the first figure draws.
    """

    name: str
    uniform: bool
    mean: float
    std: tuple[float, ...]
    lrs: tuple[float, ...]
    shown: float

    def draw(self, generator: torch.Generator, samples: int) -> Tensor:
        """Inputs of shape (samples, 10), float64."""
        shape = (samples, INPUTS)
        if self.uniform:
            z = torch.rand(shape, generator=generator, dtype=torch.float64)
            z = (z - 0.5) * math.sqrt(12)
        else:
            z = torch.randn(shape, generator=generator, dtype=torch.float64)
        return z * torch.tensor(self.std, dtype=torch.float64) + self.mean

    @property
    def curvature(self) -> float:
        """Largest eigenvalue of the Hessian 2 E[x x^T]; SGD diverges from lr = 2 / it on."""
        moments = torch.diag(torch.tensor(self.std, dtype=torch.float64).square()) + self.mean**2
        return 2 * float(torch.linalg.eigvalsh(moments)[-1])


_BOX = math.sqrt(1 / 12)  # standard deviation of a uniform draw from an interval of length 1

DISTRIBUTIONS = (
    InputDistribution("N(0, 1)", False, 0.0, (1.0,) * INPUTS, (0.005, 0.02, 0.1), 0.02),
    InputDistribution("U(-1, 1)", True, 0.0, (2 * _BOX,) * INPUTS, (0.02, 0.1), 0.1),
    InputDistribution("U(0, 1)", True, 0.5, (_BOX,) * INPUTS, (0.02, 0.1, 0.2, 0.3, 0.38), 0.2),
    InputDistribution(
        "N, sine",
        False,
        0.0,
        tuple(math.sin(i * math.pi / 11) for i in range(1, 11)),
        (0.02, 0.05, 0.1),
        0.05,
    ),
    InputDistribution(
        "N, triangle",
        False,
        0.0,
        tuple(min(i, 11 - i) / 5 for i in range(1, 11)),
        (0.02, 0.05, 0.1),
        0.05,
    ),
)
