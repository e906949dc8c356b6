"""The slow, obvious versions of what `bigbatch.statistics` computes, in float64 and two passes."""

from typing import NamedTuple

import torch
from torch import Tensor


class Noise(NamedTuple):
    grad_sqnorm: float
    grad_variance: float
    similarity: float
    noise_scale: float


def weighted(gradients: Tensor, sizes: list[float]) -> Noise:
    """DESIGN section 1, from the mean gradients g_d (k, P) of micro-batches of n_d samples."""
    g, n = gradients.double(), torch.tensor(sizes, dtype=torch.float64)
    k, N = len(sizes), n.sum()
    G = (n[:, None] * g).sum(0) / N
    A = (n * (g**2).sum(1)).sum()
    noise = (A - N * (G**2).sum()) / (k - 1)
    return _noise((G**2).sum() - noise / N, noise, N)


def mean(gradients: Tensor, sizes: list[float]) -> Noise:
    """The same where `.grad` is the sum of the g_d, whatever their n_d: `loss="mean"`."""
    g, n = gradients.double(), torch.tensor(sizes, dtype=torch.float64)
    k = len(sizes)
    P, S, H = ((g.sum(0) / k) ** 2).sum(), (g**2).sum(), (1 / n).sum()
    noise = (S - k * P) / ((1 - 1 / k) * H)
    return _noise(P - noise * H / k**2, noise, n.sum())


def nested(gradients: Tensor, sizes: list[float], parts: int) -> list[float]:
    """(|mu|^2, between, within) of clusters of micro-batches whose mean gradients are g_d (k, P).

    On average g_i . g_j is |mu|^2, and between more in one cluster, and within / n_i more if i = j.
    So three sums of squares are three linear equations: within clusters, between them, and of all.
    """
    g, n = gradients.double(), torch.tensor(sizes, dtype=torch.float64)
    k = len(sizes)
    same = torch.block_diag(*[torch.ones(parts, parts, dtype=torch.float64)] * (k // parts))
    of_cluster = n * same / (n * same).sum(1, keepdim=True)
    of_all = (n / n.sum()).expand(k, k)
    forms = [d.T @ n.diag() @ d for d in (torch.eye(k) - of_cluster, of_cluster - of_all, of_all)]
    expected = [torch.ones_like(same), same, (1 / n).diag()]
    rows = [[(form * one).sum() for one in (*expected, g @ g.T)] for form in forms]
    system = torch.tensor(rows, dtype=torch.float64)
    solved: list[float] = torch.linalg.solve(system[:, :3], system[:, 3]).tolist()
    return solved


def second_moment(gradients: Tensor, sizes: list[float]) -> tuple[Tensor, Tensor]:
    """G and s2 = sum w_d (g_d - G)^2 per element, w_d = n_d / N (VRGD, equation 7, weighted)."""
    g, n = gradients.double(), torch.tensor(sizes, dtype=torch.float64)
    w = (n / n.sum()).view(-1, *[1] * (g.ndim - 1))
    G = (w * g).sum(0)
    return G, (w * (g - G) ** 2).sum(0)


def gsnr(mean: Tensor, s2: Tensor, gamma: float, r_max: float) -> Tensor:
    """VRGD, equations 2, 8 and 9, one element after the other; without variance, the rules."""
    pairs = list(zip(mean.double().flatten().tolist(), s2.double().flatten().tolist(), strict=True))
    raw = [g**2 / variance for g, variance in pairs if variance > 0]
    average = sum(raw) / max(1, len(raw))
    result = []
    for g, variance in pairs:
        if variance > 0:
            r = g**2 / variance / average if average > 0 else 0.0
        else:
            r = gamma if g == 0 else r_max  # dead, or all micro-batches agree exactly
        result.append(min(max(r, gamma), r_max))
    return torch.tensor(result, dtype=torch.float64).view(mean.shape)


def _noise(signal: Tensor, noise: Tensor, N: Tensor) -> Noise:
    phi = signal / (signal + 2 * noise / N)
    scale = noise / signal if signal > 0 else torch.inf
    return Noise(float(signal), float(noise), float(phi), float(scale))
