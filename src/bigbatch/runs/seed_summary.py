"""Several seeds in one number: their mean, or the median that a paper gives."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any


class SeedSummary:
    """The mean and the sample standard deviation, or the median, the least and the most.

    Args:
        by_median: whether it is the latter.
    """

    def __init__(self, *, by_median: bool) -> None:
        self._by_median = by_median
        self.words = "median [least, most]" if by_median else "mean ± standard deviation"

    @classmethod
    def of(cls, settings: Iterable[Mapping[str, Any]]) -> "SeedSummary":
        """The median where the settings of every run ask for it."""
        return cls(by_median={run.get("over_seeds", "mean") for run in settings} == {"median"})

    def middle(self, values: Sequence[float]) -> float:
        """The mean or the median of one value or more."""
        return median(values) if self._by_median else fmean(values)

    def reach(self, values: Sequence[float]) -> tuple[float, float]:
        """How far the values go below the middle and above it."""
        if self._by_median:
            return median(values) - min(values), max(values) - median(values)
        deviation = stdev(values) if len(values) > 1 else 0.0
        return deviation, deviation

    def text(self, values: Sequence[float], digits: int) -> str:
        """Both at so many digits; the middle alone where the values are one at these."""
        middle = f"{self.middle(values):,.{digits}f}"
        below, above = self.reach(values)
        if not round(max(below, above), digits):
            return middle
        if self._by_median:
            return f"{middle} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"
        return f"{middle} ± {above:,.{digits}f}"

    def of_scores(self, scores: Sequence[float | None]) -> str:
        """The text of one score over runs: two digits from 10 on, else four.

        Says of how many where some have none, having diverged or not come so far.
        """
        measured = [score for score in scores if score is not None]
        if not measured:
            return "not measured"
        text = self.text(measured, 2 if abs(fmean(measured)) >= 10 else 4)
        return text + f" ({len(measured)} of {len(scores)})" * (len(measured) < len(scores))

    def of_steps(self, steps: Sequence[int], skipped: Sequence[int]) -> str:
        """The text of updates, with how many more were skipped."""
        lost = f" ({fmean(skipped):,.0f} skipped)" if any(skipped) else ""
        return self.text(steps, 0) + lost
