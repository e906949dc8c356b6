"""Groups of one backward whose samples belong together, as halves of a doubled batch do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bigbatch.advisor.observations import Measurement
from bigbatch.statistics.confidence import student_t

_LEVEL = 1 - 1e-5  # of the test whether groups belong together
_FEWEST = 8  # measured steps


@dataclass(frozen=True)
class Pairing:
    """Which groups are joined before they are compared.

    Groups are compared as if their samples were independent. Mixup with the reversed batch puts
    sample i into two rows, and a preference loss has an answer and its opposite in two rows: groups
    that share samples are alike, or opposite, and their noise is too low, or too high.
    """

    rows: str  # which rows belong together
    labels: tuple[int, ...]  # the joined group of each group
    parts: tuple[int, ...]  # the part of each group: chosen or rejected answers, for example

    @classmethod
    def find(cls, measurements: Sequence[Measurement], rows_per_sample: float) -> "Pairing | None":
        """The pairing by which groups differ most; None if it is not more than chance shows.

        That is a t-test at a level of 1e-5.
        """
        products = [one.products for one in measurements if len(one.products)]
        groups = range(len(products[0]) if products else 0)
        parts = round(rows_per_sample) if rows_per_sample > 1 else 1
        step = len(groups) // max(parts, 2)
        if step < 2 or len(groups) % max(parts, 2):
            return None
        halves = tuple(d // step for d in groups)
        apart = cls(f"i and i + B / {max(parts, 2)}", tuple(d % step for d in groups), halves)
        mirrored = cls("i and B - 1 - i", tuple(min(d, groups[-1] - d) for d in groups), halves)
        labels = tuple(d // parts for d in groups)
        adjacent = cls("next to each other", labels, tuple(d % parts for d in groups))
        scores = {
            pairing: np.array([pairing._differences(p) for p in products if len(p) == len(groups)])
            for pairing in ((apart, adjacent) if parts > 1 else (mirrored, apart))
        }
        if len(scores[apart]) < _FEWEST:
            return None
        if parts == 1:
            scores[mirrored] = scores[mirrored][:, :1]
        tests = {pairing: np.abs(_t_values(values)).max() for pairing, values in scores.items()}
        sizes = {pairing: np.abs(values.mean(0)).sum() for pairing, values in scores.items()}
        best = max(scores, key=(sizes if parts > 1 else tests).__getitem__)
        return best if tests[best] > student_t(_LEVEL, len(scores[best]) - 1) else None

    def join(self, measurement: Measurement) -> Measurement | None:
        """The measurement of the joined groups; None if its groups are not known."""
        if len(measurement.products) != len(self.labels):
            return None
        products = np.array(measurement.products)
        members = np.equal.outer(np.unique(self.labels), self.labels)
        joined = members @ products @ members.T
        ratio = _variance(joined) / (_variance(products) or 1.0)
        one = measurement.statistics
        variance = ratio * one.grad_variance
        sqnorm = one.grad_sqnorm + (one.grad_variance - variance) / one.samples
        statistics = replace(one, grad_sqnorm=sqnorm, grad_variance=variance, layers={})
        return replace(measurement, statistics=statistics)

    def _differences(self, products: Sequence[Sequence[float]]) -> tuple[float, float]:
        """How much more alike than others groups that belong together are, and those of a part."""
        values = np.array(products)
        same_sample, same_part = (np.equal.outer(x, x) for x in (self.labels, self.parts))
        others = values[same_part & ~np.eye(len(values), dtype=bool)].mean()
        across = values[~same_sample & ~same_part].mean()
        length = np.trace(values) / len(values) or 1.0
        together = values[same_sample & ~same_part].mean()
        return (together - across) / length, (others - across) / length


def _t_values(values: np.ndarray) -> np.ndarray:
    means: np.ndarray = values.mean(0)
    deviations: np.ndarray = values.std(0, ddof=1) / math.sqrt(len(values))
    return means / np.where(deviations > 0, deviations, math.inf)


def _variance(products: np.ndarray) -> float:
    """The variance of one sample's gradient from groups of equal size, up to a factor."""
    groups = len(products)
    return float(np.trace(products) * groups - products.sum()) / (groups - 1)
