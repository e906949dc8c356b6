"""Slow versions of `studies.synthetic_gradients`, one sample after the other."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Truth(NamedTuple):
    grad_sqnorm: float
    grad_variance: float


def truth(gradients: Tensor) -> Truth:
    """|mu|^2 and tr(Sigma) of a sample drawn from these rows."""
    rows = [[float(element) for element in row] for row in gradients]
    count, elements = len(rows), range(len(rows[0]))
    mean = [sum(row[j] for row in rows) / count for j in elements]
    grad_variance = sum(sum((row[j] - mean[j]) ** 2 for j in elements) for row in rows) / count
    return Truth(sum(m**2 for m in mean), grad_variance)


def elliptical(
    mean: Tensor, variances: Tensor, freedom: int | None, size: int, times: int, seed: int
) -> Tensor:
    """Means of `size` samples, (times, P), each sample drawn whole: Student t of covariance Sigma.

    A multivariate t is z / sqrt(chi^2_f / f) and has covariance f / (f - 2) times that of z.
    """
    draw = np.random.default_rng(seed)
    deviation = np.sqrt(variances.double().numpy())
    means = []
    for _ in range(times):
        samples = []
        for _ in range(size):
            sample = draw.normal(size=len(deviation)) * deviation
            if freedom is not None:
                sample = sample / np.sqrt(draw.chisquare(freedom) / freedom)
                sample = sample * np.sqrt((freedom - 2) / freedom)
            samples.append(mean.double().numpy() + sample)
        means.append(sum(samples) / size)
    return torch.tensor(np.array(means))


def kolmogorov(one: Tensor, other: Tensor) -> float:
    """The largest difference of two empirical distribution functions."""
    points = torch.cat([one, other])
    shares = [(sample <= points[:, None]).double().mean(1) for sample in (one, other)]
    return float((shares[0] - shares[1]).abs().max())


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one sample's cross-entropy by one backward, in float64, (P,)."""
    model = model.double()
    model.zero_grad()
    functional.cross_entropy(model(x.double()[None]), y[None]).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.float()
    return flat.detach()
