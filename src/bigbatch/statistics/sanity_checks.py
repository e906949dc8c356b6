"""Warnings about faults of a run that the totals of its steps show: each once, on rank 0."""

import numpy

from bigbatch.loop_warning import warn_in_loop
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.statistics.step_totals import RankTotals, StepTotals

_NORM_TOLERANCE = 1e-7  # relative difference of squared norms; the order of sums may differ
_SURE_STEPS = 3  # steps with nearly equal norms before a warning; exact equality counts as 3
_AGREEMENT = 1e-5  # noise / (N signal) of equal gradients, from rounding
_LEVERAGE = 20.0  # sum of squared deviations of ln n_d; the error of the slope is near 0.15
_MAX_MEAN_SLOPE = 0.5  # the slope of mean losses is near 0 or -1, of weighted ones near 1 or 2
_MIN_WEIGHTED_SLOPE = 0.95  # heavy tails lift the slope of mean losses to 0.8


class SanityChecks:
    """Checks each step, and warns once about each fault of the run."""

    def __init__(self, loss: str, *, warns: bool = True) -> None:
        self._loss, self._warns = loss, warns
        self._reported: set[str] = set()  # kinds of faults
        self._equal_norm_steps: dict[tuple[int, ...], int] = {}  # ranks -> steps with equal norms
        self._slope = (0.0, 0.0)  # covariance and variance sums

    def check_totals(self, totals: StepTotals, *, may_overflow: bool) -> None:
        """Checks the totals of a step."""
        if not totals.is_finite:
            if not may_overflow:
                self._warn("finite", _nonfinite_message(totals.ranks))
            return
        self._warn("alike", self._equal_data_message(totals.ranks))
        covariance, variance = self._slope
        if variance < _LEVERAGE:  # checked once, early in training
            self._slope = covariance + totals.slope[0], variance + totals.slope[1]
            self._warn("slope", _loss_message(*self._slope, self._loss))

    def check_statistics(self, statistics: GradientStatistics) -> None:
        """Checks the statistics of a step."""
        signal = statistics.samples * statistics.grad_sqnorm
        if signal > 0 and statistics.grad_variance <= _AGREEMENT * signal:
            self._warn(
                "agree",
                f"all {statistics.micro_batches} micro-batches of a step have the same gradient to "
                "rounding; are they the same data (a missing DistributedSampler, a loader without "
                "shuffling), or was the gradient averaged before it was measured?",
            )

    def _equal_data_message(self, ranks: RankTotals) -> str:
        """The warning about ranks with equal gradients, which are neighbours in order of norm."""
        if len(ranks.samples) == 1:
            return ""
        order = ranks.sqnorm_sum.argsort(kind="stable")
        sums = numpy.stack([ranks.sqnorm_sum, ranks.numbered_sqnorm_sum])[:, order]
        alike = numpy.isclose(sums[:, 1:], sums[:, :-1], rtol=_NORM_TOLERANCE, atol=0)
        earlier, self._equal_norm_steps = self._equal_norm_steps, {}
        for place in numpy.flatnonzero(alike.all(axis=0)).tolist():
            pair = tuple(sorted(order[place : place + 2].tolist()))
            is_equal = (sums[:, place] == sums[:, place + 1]).all()
            steps = _SURE_STEPS if is_equal else earlier.get(pair, 0) + 1
            self._equal_norm_steps[pair] = steps
        found = self._equal_norm_steps.items()
        sure_pairs = [
            pair for pair, steps in found if steps >= _SURE_STEPS and ranks.sqnorm_sum[pair[0]]
        ]
        if not sure_pairs:
            return ""
        first, second = sure_pairs[0]
        return (
            f"ranks {first} and {second} have the same gradients ({len(sure_pairs)} such pairs of "
            f"{len(ranks.samples)} ranks), so the noise looks too small: is a DistributedSampler "
            "missing, or are gradients averaged before the meter's hooks?"
        )

    def _warn(self, kind: str, message: str) -> None:
        if message and kind not in self._reported:
            self._reported.add(kind)
            if self._warns:
                warn_in_loop(message)


def _nonfinite_message(ranks: RankTotals) -> str:
    bad = numpy.flatnonzero(~numpy.isfinite(ranks.sqnorm_sum)).tolist()
    names = [
        (
            f"micro-batch {first:.0f}"
            if (first := ranks.first_nonfinite[number])
            else "a micro-batch"
        )
        + (f" on rank {number}" if len(ranks.samples) > 1 else "")
        for number in bad
    ]
    return (
        f"the gradient of {', '.join(names) or 'the step, though of no micro-batch,'} is not "
        "finite, so this step has no noise; look at its data and loss"
    )


def _loss_message(covariance: float, variance: float, loss: str) -> str:
    """The warning about a wrong `loss`: |h_d|^2 grows with n_d only for weighted losses."""
    if variance < _LEVERAGE:
        return ""
    slope = covariance / variance
    if loss == "weighted" and slope < _MAX_MEAN_SLOPE:
        return (
            f"larger micro-batches add no longer gradients (|h|^2 ~ n^{slope:.2f}), as plain mean "
            'losses do; multiply each loss by n_d / N, or state GradientMeter(loss="mean")'
        )
    if loss == "mean" and slope > _MIN_WEIGHTED_SLOPE:
        return (
            f"larger micro-batches add longer gradients (|h|^2 ~ n^{slope:.2f}), as losses "
            'weighted by n_d do; state GradientMeter(loss="weighted")'
        )
    return ""
