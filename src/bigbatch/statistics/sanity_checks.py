"""Faults of a run that the totals of its steps show; each is warned of once, on rank 0."""

import itertools
import math
import warnings
from collections.abc import Iterator

from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.statistics.step_totals import OfRank, StepTotals

_OUTLIER_RATIO = 10.0  # times the other ranks' gradient norm
_STREAK = 20  # steps on end; of W equal ranks one is the longest so often with W^-20
_NORM_TOLERANCE = 1e-7  # relative difference of squared norms; kernels may add in another order
_SURE_STEPS = 3  # steps in which two ranks' norms agree so well; exact equality counts as three
_AGREEMENT = 1e-5  # noise / (N signal): what rounding leaves of equal gradients
_LEVERAGE = 20.0  # sum of squared deviations of ln n_d, for a slope with an error near 0.15
_AS_MEANS = 0.5  # a slope below: 0 or -1 is expected of mean losses, 1 or 2 of weighted ones
_AS_WEIGHTED = 0.95  # above; heavy tails lift the slope of mean losses to 0.8


class SanityChecks:
    """Checks each step and warns once of each fault of the run.

    Args:
        loss: the meter's `loss`, "weighted" or "mean".
        warns: whether this rank is the one that warns.
    """

    def __init__(self, loss: str, *, warns: bool = True) -> None:
        self._loss, self._warns = loss, warns
        self._reported: set[str] = set()  # kinds of faults
        self._equal_norm_steps: dict[tuple[int, int], int] = {}  # ranks -> steps with equal norms
        self._outlier_steps: dict[
            tuple[int, bool], int
        ] = {}  # (rank, whether longer) -> steps on end
        self._slope = (0.0, 0.0)  # covariance and variance sums

    def check_totals(self, totals: StepTotals, *, may_overflow: bool) -> None:
        """Checks the totals of a step.

        Args:
            totals: the totals over all ranks.
            may_overflow: whether a GradScaler expects gradients that are not finite.
        """
        if not totals.finite:
            if not may_overflow:
                self._warn("finite", _not_finite(totals.of_ranks))
            return
        for kind, message in self._outliers(totals.of_ranks):
            self._warn(kind, message)
        self._warn("alike", self._same_data(totals.of_ranks))
        covariance, variance = self._slope
        if variance < _LEVERAGE:  # looked at once, while gradients are far from convergence
            self._slope = covariance + totals.slope[0], variance + totals.slope[1]
            self._warn("slope", _wrong_loss(*self._slope, self._loss))

    def check_statistics(self, noise: GradientStatistics) -> None:
        """Checks the statistics of a step."""
        if (
            noise.grad_sqnorm > 0
            and noise.grad_variance <= _AGREEMENT * noise.samples * noise.grad_sqnorm
        ):
            self._warn(
                "agree",
                f"all {noise.micro_batches} micro-batches of a step have the same gradient to "
                "rounding; are they the same data (a missing DistributedSampler, a loader without "
                "shuffling), or was the gradient averaged before it was measured?",
            )

    def _outliers(self, ranks: list[OfRank]) -> Iterator[tuple[str, str]]:
        """Ranks that were far off for many steps; late in training healthy ones are in some."""
        ratios = dict(_outlier_ratios(ranks, self._loss))
        self._outlier_steps = {far: self._outlier_steps.get(far, 0) + 1 for far in ratios}
        for (number, long), ratio in ratios.items():
            if self._outlier_steps[number, long] >= _STREAK:
                yield (
                    f"outlier {number}",
                    f"the gradients of rank {number} are {ratio:.3g} x as long as the median of "
                    f"the other ranks, and were far off in all of {_STREAK} steps; look for broken "
                    "data, stale weights or faulty arithmetic there",
                )

    def _same_data(self, ranks: list[OfRank]) -> str:
        """Neighbours in the order of their norms are compared: equal ones are neighbours."""
        order = sorted(range(len(ranks)), key=lambda number: ranks[number].squares)
        pairs = [(min(pair), max(pair)) for pair in itertools.pairwise(order)]
        alike = {}
        for one, other in pairs:
            a, b = ranks[one], ranks[other]
            if a.squares == b.squares and a.numbered == b.numbered:
                alike[one, other] = _SURE_STEPS
            elif _nearly_equal(a.squares, b.squares) and _nearly_equal(a.numbered, b.numbered):
                alike[one, other] = self._equal_norm_steps.get((one, other), 0) + 1
        self._equal_norm_steps = alike
        sure_pairs = [
            pair for pair, steps in alike.items() if steps >= _SURE_STEPS and ranks[pair[0]].squares
        ]
        if not sure_pairs:
            return ""
        first, second = sure_pairs[0]
        return (
            f"ranks {first} and {second} have the same gradients ({len(sure_pairs)} such "
            f"pairs of {len(ranks)} ranks), so the noise looks too small: is a DistributedSampler "
            "missing, or are gradients averaged before the meter's hooks?"
        )

    def _warn(self, kind: str, message: str) -> None:
        if message and kind not in self._reported:
            self._reported.add(kind)
            if self._warns:
                warnings.warn(message, stacklevel=5)


def _nearly_equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_NORM_TOLERANCE)


def _not_finite(ranks: list[OfRank]) -> str:
    where = [
        f"micro-batch {rank.not_finite:.0f} on rank {number}"
        if len(ranks) > 1
        else f"micro-batch {rank.not_finite:.0f}"
        for number, rank in enumerate(ranks)
        if rank.not_finite
    ]
    return (
        f"the gradient of {', '.join(where) or 'the step, though of no micro-batch,'} is not "
        "finite, so this step has no noise; look at its data and loss"
    )


def _outlier_ratios(ranks: list[OfRank], loss: str) -> Iterator[tuple[tuple[int, bool], float]]:
    """((rank, whether longer), ratio) of those whose gradients are far from the others' in length.

    A step to which a rank adds nothing, having nothing but empty micro-batches, is left out.
    """
    if len(ranks) < 2 or not all(rank.micro_batches for rank in ranks):
        return
    power = 1 if loss == "weighted" else -1  # h_d is about g_d / k, or g_d
    norms = [math.sqrt(rank.squares * rank.micro_batches**power) for rank in ranks]
    in_order, last = sorted(norms), len(norms) - 1
    upper, lower = last // 2, (last - 1) // 2  # medians of the others, where one is left out
    for number, norm in enumerate(norms):
        high = in_order[upper + (norm <= in_order[upper])]
        low = in_order[lower + (norm <= in_order[lower])]
        long = norm > _OUTLIER_RATIO * high
        short = len(ranks) > 2 and norm * _OUTLIER_RATIO < low
        if long or short:
            middle = high if long else low
            yield (number, long), norm / middle if middle else math.inf


def _wrong_loss(covariance: float, variance: float, loss: str) -> str:
    """|h_d|^2 grows with n_d where losses are weighted by it, and falls where they are means."""
    if variance < _LEVERAGE:
        return ""
    slope = covariance / variance
    if loss == "weighted" and slope < _AS_MEANS:
        return (
            f"larger micro-batches add no longer gradients (|h|^2 ~ n^{slope:.2f}), as plain mean "
            'losses do; multiply each loss by n_d / N, or state GradientMeter(loss="mean")'
        )
    if loss == "mean" and slope > _AS_WEIGHTED:
        return (
            f"larger micro-batches add longer gradients (|h|^2 ~ n^{slope:.2f}), as losses "
            'weighted by n_d do; state GradientMeter(loss="weighted")'
        )
    return ""
