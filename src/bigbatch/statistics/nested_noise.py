"""Noise of a two-stage sample: clusters, such as prompts, and samples of each, such as rollouts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bigbatch.errors import SettingError
from bigbatch.setting_types import Positive, checked


@dataclass(frozen=True)
class NestedNoise:
    """The noise between clusters and within them, so whether to add clusters or samples of each.

    The gradient of sample r of cluster c is mu + u_c + e_cr. With P clusters of R samples

        Var(G) = between / P + within / (P R),   between = tr Cov(u),  within = tr Cov(e)

    More clusters lessen both terms, more samples of each cluster the second one alone. Estimates of
    one step are noisy: use the `average` of many.

    Args:
        grad_sqnorm: unbiased estimate of |mu|^2; may be negative on one step.
        between: unbiased estimate of tr Cov(u), the variance of a cluster's true gradient; may be
            negative on one step. Same unit.
        within: estimate of tr Cov(e), the variance of a sample's gradient about its cluster's.
    Source:
        Variance components of a nested design (Searle, Casella, McCulloch 1992, chapter 3);
        docs/rl.md.
    Example:
        >>> noise = NestedNoise(grad_sqnorm=0.5, between=2.0, within=24.0)
        >>> noise.variance(clusters=16, cluster_size=8)
        0.3125
        >>> noise.noise_scale_of_clusters(cluster_size=8)
        10.0
        >>> noise.noise_scale_of_samples(clusters=16)
        38.4
        >>> noise.best_cluster_size(cluster_cost=3.0)
        6.0
    """

    grad_sqnorm: float
    between: float
    within: float

    @classmethod
    def average(cls, steps: Iterable["NestedNoise"]) -> "NestedNoise":
        """The averages of the three components over steps of the same shape."""
        rows = [(step.grad_sqnorm, step.between, step.within) for step in steps]
        if not rows:
            raise SettingError("no steps to average; read the meter first")
        return cls(*(math.fsum(column) / len(rows) for column in zip(*rows, strict=True)))

    @checked
    def variance(self, clusters: Positive, cluster_size: Positive) -> float:
        """Var(G) of a step of so many clusters, with `cluster_size` samples of each."""
        return (self.between + self.within / cluster_size) / clusters

    @checked
    def noise_scale_of_clusters(self, cluster_size: Positive) -> float:
        """The clusters with which Var(G) is |mu|^2, at so many samples of each.

            P = (between + within / R) / |mu|^2

        It is B_simple with clusters as the samples; times R, it is in samples. +inf if
        grad_sqnorm <= 0.
        """
        return _ratio(self.between + self.within / cluster_size, self.grad_sqnorm)

    @checked
    def noise_scale_of_samples(self, clusters: Positive) -> float:
        """The samples with which their noise is the squared gradient of the clusters that are held.

            n = within / (|mu|^2 + between / P),   over all P clusters, n / P of each

        It is B_simple of more samples of the same clusters, whose own noise between / P stays. +inf
        if the gradient is lost in noise.
        """
        return _ratio(self.within, self.grad_sqnorm + self.between / clusters)

    @checked
    def best_cluster_size(self, cluster_cost: Positive, sample_cost: Positive = 1.0) -> float:
        """The samples of a cluster with which Var(G) is least at a given cost of the step.

            R* = sqrt(within / between * cluster_cost / sample_cost)

        Minimizes Var(G) for P (cluster_cost + R sample_cost) fixed: below R* add samples of each
        cluster, above it clusters. Not rounded; may be below 1. +inf if between <= 0.

        Args:
            cluster_cost: what a cluster costs without its samples: a prompt's prefill, for example.
            sample_cost: what a sample costs, a rollout's generation and backward, in the same unit.
        Source:
            Cochran, Sampling Techniques (3rd ed. 1977), section 10.6.
        """
        cost = cluster_cost / sample_cost
        return math.sqrt(max(0.0, _ratio(self.within, self.between)) * cost)


def variance_components(
    spread_of_samples: float,
    spread_of_clusters: float,
    sum_sqnorm: float,
    clusters: int,
    samples: float,
    square_sizes: float,
) -> NestedNoise:
    """The components from mean squares within and between clusters, which may differ in size.

    With n_c samples of cluster c, N = sum n_c, P clusters, and n_0 = (N - sum n_c^2 / N) / (P - 1)

        within = MS_within,  between = (MS_between - MS_within) / n_0
        |mu|^2 = |G|^2 - between sum n_c^2 / N^2 - within / N

    All are unbiased, whatever the sizes.

    Args:
        spread_of_samples: MS_within, the mean square of parts about their cluster.
        spread_of_clusters: MS_between, that of clusters about G, in units of one sample.
        sum_sqnorm: |G|^2.
        clusters: P, at least 2.
        samples: N.
        square_sizes: sum n_c^2.
    """
    mean_size = (samples - square_sizes / samples) / (clusters - 1)
    between = (spread_of_clusters - spread_of_samples) / mean_size
    noise = between * square_sizes / samples**2 + spread_of_samples / samples
    return NestedNoise(sum_sqnorm - noise, between, spread_of_samples)


def _ratio(noise: float, signal: float) -> float:
    if signal > 0:
        return noise / signal
    return math.inf if signal <= 0 < noise else math.nan
