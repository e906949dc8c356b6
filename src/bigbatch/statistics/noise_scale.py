"""Signal, noise and noise scale of the gradient of one step.

Notation: a step has k micro-batches; micro-batch d has n_d samples and the mean gradient g_d;
N = sum n_d; G = sum n_d g_d / N is the gradient of the step. mu is the true gradient and Sigma
the covariance of one sample's gradient. Scalars are Python floats (float64).
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from bigbatch.errors import GradientError
from bigbatch.statistics.confidence import Interval
from bigbatch.statistics.nested_noise import NestedNoise, variance_components

Compared = Literal["micro-batches", "groups", "clusters", "consecutive steps"]
"""The gradients that statistics compare: of a step's micro-batches, of groups of samples of its
backwards, of clusters of micro-batches, or of two steps, which differ also by what the first one
has changed."""

_FLOAT32_EPS = 2.0**-23
_ROUNDING = 1e-3  # largest (N |G|^2 - A) / A that rounding of float32 sums explains


@dataclass(frozen=True)
class GradientStatistics:
    """How much the micro-batches of one step agree.

    Args:
        grad_sqnorm: unbiased estimate of |mu|^2, the squared norm of the true gradient; may be
            negative on one step.
        grad_variance: estimate of tr(Sigma), the variance of one sample's gradient; same unit.
        samples: N, samples of the step over all ranks.
        micro_batches: k over all ranks, the number of gradients that are compared.
        interval: confidence interval for ln(1 + N signal / noise); None if not measured.
        layers: layer name -> the statistics of the layer; empty if not measured.
        half_batch_cosine: SimiGrad's own cosine of two half-batch gradients; None if not measured.
        nested: the noise between and within clusters; None if not measured.
        compared: the gradients that are compared; the estimates of "consecutive steps" are biased
            by what the first step has changed.
    Source:
        docs/theory.md; McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
    Example:
        >>> step = GradientStatistics(1.0, 64.0, samples=256, micro_batches=8)
        >>> step.noise_scale, round(step.similarity, 4)
        (64.0, 0.6667)
    """

    grad_sqnorm: float
    grad_variance: float
    samples: float
    micro_batches: int
    _: KW_ONLY
    interval: Interval | None = None
    layers: Mapping[str, "GradientStatistics"] = field(default_factory=dict, hash=False)
    half_batch_cosine: float | None = None
    nested: NestedNoise | None = None
    compared: Compared = "micro-batches"

    @property
    def similarity(self) -> float:
        """Expected cosine of two half-batch gradients.

            phi = grad_sqnorm / (grad_sqnorm + 2 grad_variance / N)

        In [-1, 1]; nan if every gradient is zero. It is -1 where the signal is below -noise / N, as
        that of averages, and of mean losses of unequal sizes, can be.
        """
        if self.grad_sqnorm < -self.grad_variance / self.samples:
            return -1.0
        total = self.grad_sqnorm + 2 * self.grad_variance / self.samples
        return self.grad_sqnorm / total if total else math.nan

    @property
    def noise_scale(self) -> float:
        """B_simple = grad_variance / grad_sqnorm, in samples; +inf if grad_sqnorm <= 0."""
        if self.grad_sqnorm > 0:
            return self.grad_variance / self.grad_sqnorm
        return math.inf if self.grad_sqnorm <= 0 < self.grad_variance else math.nan

    @property
    def similarity_interval(self) -> tuple[float, float] | None:
        """(low, high) of the similarity; None if no interval was measured."""
        return None if self.interval is None else self.interval.similarity

    @property
    def noise_scale_interval(self) -> tuple[float, float] | None:
        """(low, high) of the noise scale in samples; None if no interval was measured."""
        return None if self.interval is None else self.interval.noise_scale(self.samples)

    def adascale_gain(self, base_batch: float, batch_size: float | None = None) -> float:
        """AdaScale's gain over the base batch: 1 without noise, B / B_base without signal.

            gain = (|mu|^2 + tr(Sigma) / B_base) / (|mu|^2 + tr(Sigma) / B)

        B_base is the batch size that the learning rate was tuned for; B is `batch_size`, by default
        the samples of the step.

        Source:
            Johnson et al. 2020 (arXiv 2007.05105), equation 4; docs/theory.md (10).
        Example:
            >>> GradientStatistics(0.0, 64.0, samples=256, micro_batches=8).adascale_gain(64)
            4.0
        """
        signal = max(self.grad_sqnorm, 0.0)  # max() keeps nan in this order of arguments
        total = signal + self.grad_variance / (self.samples if batch_size is None else batch_size)
        return (signal + self.grad_variance / base_batch) / total if total else 1.0

    def generalization_ratio(self, batch_size: float | None = None) -> float:
        """R(n) = 1 / (1 + B_simple / n): the share of one step's training gain that is test gain.

        It is not a measured test loss. n is `batch_size`, by default the samples of the step.

        Source:
            Liu et al. 2020 (arXiv 2001.07384) and VRGD (arXiv 2309.13681), summed over the
            parameters; docs/theory.md (11).
        Example:
            >>> GradientStatistics(1.0, 64.0, samples=64, micro_batches=8).generalization_ratio()
            0.5
        """
        return 1 / (1 + self.noise_scale / (self.samples if batch_size is None else batch_size))


def from_weighted_losses(
    sqnorms_over_sizes: float,
    sum_sqnorm: float,
    micro_batches: int,
    samples: float,
    eps: float = _FLOAT32_EPS,
    compared: Compared = "micro-batches",
) -> GradientStatistics:
    """Noise and signal if the losses of a step sum to its mean loss, so `.grad` is G.

    A micro-batch then adds h_d = n_d g_d / N. With sum |h_d|^2 / n_d and |G|^2 = |sum h_d|^2,

        A = sum n_d |g_d|^2 = N^2 sum |h_d|^2 / n_d
        noise = (A - N |G|^2) / (k - 1),    signal = |G|^2 - noise / N

    Both are unbiased if the samples of a step are independent; the n_d may differ. `eps` is the
    relative rounding of the gradients' type.

    Raises:
        GradientError: k < 2, or A < N |G|^2, which no data can give.
    Source:
        docs/theory.md (2).
    """
    k, total = _at_least_two(micro_batches), _rounded(samples)
    noise = _variance(total**2 * sqnorms_over_sizes, total * sum_sqnorm, k, k - 1, eps)
    return GradientStatistics(sum_sqnorm - noise / total, noise, total, k, compared=compared)


def from_clusters(
    sqnorms_over_sizes: float,
    cluster_sqnorms_over_sizes: float,
    sum_sqnorm: float,
    micro_batches: int,
    samples: float,
    clusters: int,
    square_sizes: float,
    eps: float = _FLOAT32_EPS,
) -> GradientStatistics:
    """Noise and signal of weighted losses if each cluster of samples is several micro-batches.

    Cluster c has n_c samples, and its micro-batches add H_c = sum h_d. With P clusters,

        A1 = N^2 sum |h_d|^2 / n_d,    A2 = N^2 sum |H_c|^2 / n_c
        MS_within = (A1 - A2) / (k - P),    MS_between = (A2 - N |G|^2) / (P - 1)
        noise = N Var(G) = between sum n_c^2 / N + within

    `variance_components` has the rest. The noise is that of one sample where clusters of these
    sizes are added, so noise scale and similarity are of more clusters. `square_sizes` is
    sum n_c^2.

    Raises:
        GradientError: fewer than two clusters, or sums that no data can give.
    """
    if clusters < 2:
        raise GradientError(
            f"{clusters} cluster seen, the noise between clusters needs at least 2; give the step "
            "more of them"
        )
    k, total = micro_batches, _rounded(samples)
    of_parts, of_clusters = total**2 * sqnorms_over_sizes, total**2 * cluster_sqnorms_over_sizes
    within = _variance(of_parts, of_clusters, k, k - clusters, eps)
    spread = _variance(of_clusters, total * sum_sqnorm, clusters, clusters - 1, eps)
    nested = variance_components(within, spread, sum_sqnorm, clusters, total, square_sizes)
    noise = max(0.0, total * (sum_sqnorm - nested.grad_sqnorm))  # below 0 by unequal sizes alone
    return GradientStatistics(
        nested.grad_sqnorm, noise, total, clusters, nested=nested, compared="clusters"
    )


def from_mean_losses(
    sqnorm_sum: float,
    sum_sqnorm: float,
    micro_batches: int,
    samples: float,
    inverse_sizes: float,
    eps: float = _FLOAT32_EPS,
) -> GradientStatistics:
    """Noise and signal if each loss is its micro-batch's plain mean, so `.grad` is sum g_d.

    A = sum n_d |g_d|^2 cannot be used, because G is not known. With

        S = sum |g_d|^2,  P = |sum g_d / k|^2,  H = sum 1/n_d
        noise = (S - k P) / ((1 - 1/k) H),    signal = P - noise H / k^2

    Source:
        docs/theory.md (3).
    """
    k = _at_least_two(micro_batches)
    mean = sum_sqnorm / k**2
    noise = _variance(sqnorm_sum, k * mean, k, (1 - 1 / k) * inverse_sizes, eps)
    return GradientStatistics(mean - noise * inverse_sizes / k**2, noise, _rounded(samples), k)


def _rounded(samples: float) -> float:
    # weights that stand for samples have rounding errors
    return round(samples) if math.isclose(samples, round(samples)) else samples


def _at_least_two(micro_batches: int) -> int:
    if micro_batches < 2:
        raise GradientError(
            f"{micro_batches} micro-batch seen, noise needs at least 2; split the batch into more "
            "backwards"
        )
    return micro_batches


def _variance(spread: float, mean_part: float, k: int, freedom: float, eps: float) -> float:
    """(spread - mean_part) / freedom, negative only by rounding errors; nan if not finite."""
    difference = spread - mean_part
    if not math.isfinite(difference):
        return math.nan
    if difference < -max(_ROUNDING, math.sqrt(k) * eps) * spread:
        raise GradientError(
            f"the step's gradient is longer than its micro-batches allow (sum n_d |g_d|^2 = "
            f"{spread:.6g} < N |G|^2 = {mean_part:.6g}); are the sizes those of the backwards, and "
            "was .grad empty before the first one?"
        )
    return max(difference, 0.0) / freedom
