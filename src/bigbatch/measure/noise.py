"""What one step says about the noise of its gradient.

Notation: a step has k micro-batches; micro-batch d has n_d samples and the mean gradient g_d;
N = sum n_d; G = sum n_d g_d / N is the gradient of the step. mu is the true gradient and Sigma
the covariance of one sample's gradient. Scalars are Python floats (float64).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.errors import GradientError

_FLOAT32_EPS = 2.0**-23
_ROUNDING = 1e-3  # A < N |G|^2 by more than this share of A is no rounding of float32 sums


@dataclass(frozen=True)
class GradientNoise:
    """How much the micro-batches of one step agree.

    Args:
        signal: estimate of |mu|^2, the squared norm of the true gradient; unbiased, so it may be
            negative on one step.
        noise: estimate of tr(Sigma), the variance of one sample's gradient, in the same unit.
        samples: N, samples of the step over all ranks.
        micro_batches: k, how many gradients the estimate rests on.
    Source:
        docs/theory.md; McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
    Example:
        >>> step = GradientNoise(signal=1.0, noise=64.0, samples=256, micro_batches=8)
        >>> step.noise_scale, round(step.similarity, 4)
        (64.0, 0.6667)
    """

    signal: float
    noise: float
    samples: float
    micro_batches: int

    @property
    def similarity(self) -> float:
        """phi = signal / (signal + 2 noise / N): the expected cosine of two half-batch gradients.

        In [-1, 1]; nan where every gradient is zero. Averages, and mean losses of unequal sizes,
        can hold a signal below what |G|^2 >= 0 allows: that is -1.
        """
        if self.signal < -self.noise / self.samples:
            return -1.0
        both = self.signal + 2 * self.noise / self.samples
        return self.signal / both if both else math.nan

    @property
    def noise_scale(self) -> float:
        """B_simple = noise / signal, in samples; +inf where the signal is not positive."""
        if self.signal > 0:
            return self.noise / self.signal
        return math.inf if self.noise > 0 else math.nan


def from_weighted_losses(
    squared_norms: Sequence[float],
    squared_norm_of_sum: float,
    sizes: Sequence[float],
    eps: float = _FLOAT32_EPS,
) -> GradientNoise:
    """Noise and signal where the losses of a step sum to its mean loss, so `.grad` is G.

    A micro-batch then adds h_d = n_d g_d / N, and

        A = sum n_d |g_d|^2 = sum N^2 |h_d|^2 / n_d
        noise = (A - N |G|^2) / (k - 1),    signal = |G|^2 - noise / N

    Both are unbiased where the samples of a step are independent; the n_d may differ.

    Args:
        squared_norms: |h_d|^2 of each micro-batch, k of them.
        squared_norm_of_sum: |sum h_d|^2 = |G|^2.
        sizes: n_d, what the loss of each micro-batch averages over, k of them, positive.
        eps: relative rounding of the gradients' type, for the check that A >= N |G|^2.
    Raises:
        GradientError: fewer than two micro-batches, or A < N |G|^2, which no data can give.
    Source:
        docs/theory.md (2).
    Example:
        >>> from_weighted_losses([1.0, 1.0], 2.0, sizes=[8, 8])  # (2, 0) and (0, 2), halved
        GradientNoise(signal=0.0, noise=32.0, samples=16, micro_batches=2)
    """
    k, total = _count(squared_norms, sizes)
    spread = total**2 * math.fsum(s / n for n, s in zip(sizes, squared_norms, strict=True))
    noise = _positive(spread, total * squared_norm_of_sum, k * eps) / (k - 1)
    return GradientNoise(squared_norm_of_sum - noise / total, noise, total, k)


def from_mean_losses(
    squared_norms: Sequence[float],
    squared_norm_of_sum: float,
    sizes: Sequence[float],
    eps: float = _FLOAT32_EPS,
) -> GradientNoise:
    """The same where each backward was its micro-batch's plain mean loss, so `.grad` is sum g_d.

    A = sum n_d |g_d|^2 cannot be used: G is not known. With

        S = sum |g_d|^2,  P = |sum g_d / k|^2,  H = sum 1/n_d
        noise = (S - k P) / ((1 - 1/k) H),    signal = P - noise H / k^2

    Args:
        squared_norms: |g_d|^2 of each micro-batch, k of them.
        squared_norm_of_sum: |sum g_d|^2.
        sizes: n_d of each micro-batch, positive.
        eps: as for `from_weighted_losses`.
    Raises:
        GradientError: as for `from_weighted_losses`.
    Source:
        docs/theory.md (3).
    """
    k, total = _count(squared_norms, sizes)
    mean = squared_norm_of_sum / k**2
    inverse = math.fsum(1 / n for n in sizes)
    noise = _positive(math.fsum(squared_norms), k * mean, k * eps) / ((1 - 1 / k) * inverse)
    return GradientNoise(mean - noise * inverse / k**2, noise, total, k)


def _count(squared_norms: Sequence[float], sizes: Sequence[float]) -> tuple[int, float]:
    k = len(squared_norms)
    if k < 2:
        raise GradientError(
            f"{k} micro-batch seen, noise needs at least 2; split the batch into more backwards"
        )
    if len(sizes) != k:
        raise GradientError(
            f"{k} backwards were seen but {len(sizes)} sizes stated; where one micro-batch is "
            "several backwards, mark it with `with meter.micro_batch():`"
        )
    if min(sizes) <= 0:
        raise GradientError(f"micro-batch sizes must be positive, got {list(sizes)}")
    total = math.fsum(sizes)
    return k, round(total) if math.isclose(total, round(total)) else total


def _positive(spread: float, of_mean: float, rounding: float) -> float:
    """spread - of_mean, which cannot be negative but for rounding."""
    if spread - of_mean < -max(_ROUNDING, rounding) * spread:
        raise GradientError(
            f"the step's gradient is longer than its micro-batches allow (sum n_d |g_d|^2 = "
            f"{spread:.6g} < N |G|^2 = {of_mean:.6g}); are the sizes those of the backwards, and "
            "was .grad empty before the first one?"
        )
    return max(spread - of_mean, 0.0)  # in this order nan stays nan
