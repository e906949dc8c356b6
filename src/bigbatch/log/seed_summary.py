"""Summaries of several seeds: the mean, or the median where a paper reports that."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any


class SeedSummary:
    """Mean and sample standard deviation, or median, minimum and maximum.

    Args:
        by_median: whether to take median, minimum and maximum.
    """

    def __init__(self, *, by_median: bool) -> None:
        self._by_median = by_median
        self.center_word = "median" if by_median else "mean"
        self.words = "median [least, most]" if by_median else "mean ± standard deviation"

    @classmethod
    def of(cls, settings: Iterable[Mapping[str, Any]]) -> "SeedSummary":
        """The summary of runs with these settings: by median where all of them say so."""
        return cls(by_median={run.get("over_seeds", "mean") for run in settings} == {"median"})

    def center(self, values: Sequence[float]) -> float:
        """The mean or the median of one value or more."""
        return median(values) if self._by_median else fmean(values)

    def error_bars(self, values: Sequence[float]) -> tuple[float, float]:
        """Distances from the center to the lower and the upper end."""
        if self._by_median:
            return median(values) - min(values), max(values) - median(values)
        deviation = stdev(values) if len(values) > 1 else 0.0
        return deviation, deviation

    def text(self, values: Sequence[float], digits: int) -> str:
        """Center and spread with this number of digits; the center alone where they are equal."""
        center = f"{self.center(values):,.{digits}f}"
        below, above = self.error_bars(values)
        if not round(max(below, above), digits):
            return center
        if self._by_median:
            return f"{center} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"
        return f"{center} ± {above:,.{digits}f}"

    def scores_text(self, scores: Sequence[float | None]) -> str:
        """The text of one score over runs: two digits from 10 on, else four.

        It has the number of runs with a score where others diverged or have none yet.
        """
        measured = [score for score in scores if score is not None]
        if not measured:
            return "not measured"
        text = self.text(measured, 2 if abs(fmean(measured)) >= 10 else 4)
        return text + f" ({len(measured)} of {len(scores)})" * (len(measured) < len(scores))

    def steps_text(self, steps: Sequence[int], skipped: Sequence[int]) -> str:
        """The text of numbers of updates and of skipped steps."""
        skipped_text = f" ({fmean(skipped):,.0f} skipped)" if any(skipped) else ""
        return self.text(steps, 0) + skipped_text
