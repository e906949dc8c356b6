"""A generated click log whose true probabilities are known.

Categories have a Zipf distribution. The logit of a click is a sum of effects of the numbers, of
each category, and of each pair of categories, through the product of their hidden factors; the
label is drawn from that probability. So no model can rank better than the truth does, but for
chance.
"""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from bigbatch.experiments.datasets.click_rows import CATEGORIES, CLICK, NUMBERS, Packed

_SEED = 0  # one log for every seed and arm
_FACTORS = 4
_SPREAD = 1.6  # standard deviation of the logit
_MEAN = -1.5  # of the logit: about a quarter of the rows is clicked
_SHARES = (0.4, 0.4, 0.2)  # of its variance: numbers, categories, pairs of categories
_FEWEST, _MOST = 4, 1_000  # different categories of a column
_ZIPF = 1.1


@dataclass(frozen=True)
class SyntheticClicks:
    """Rows as Criteo's are packed, and how likely each was to be clicked.

    Args:
        rows: of it.
        truth: probabilities, (rows,).
    """

    rows: Packed
    truth: NDArray[numpy.float64]


def click_log(rows: int) -> SyntheticClicks:
    """Draws so many rows; always the same ones, and the first of a longer log are others.

    Example:
        >>> log = click_log(1000)
        >>> bool(0.15 < log.rows["label"].mean() < 0.35)
        True
    """
    draw = numpy.random.default_rng(_SEED)
    log = numpy.empty(rows, CLICK)
    log["numbers"] = numpy.log1p(draw.poisson(draw.lognormal(1.0, 1.0, (rows, NUMBERS))))
    alone = numpy.zeros(rows)
    total, squares = numpy.zeros((rows, _FACTORS)), numpy.zeros(rows)
    for column, count in enumerate(numpy.geomspace(_FEWEST, _MOST, CATEGORIES).astype(int)):
        often = 1.0 / numpy.arange(1, count + 1) ** _ZIPF
        found = draw.choice(count, rows, p=often / often.sum())
        log["codes"][:, column] = found
        alone += draw.normal(size=count)[found]
        factors = draw.normal(size=(count, _FACTORS))[found]
        total += factors
        squares += (factors**2).sum(1)
    pairs = ((total**2).sum(1) - squares) / 2  # of all two columns, the product of their factors
    effects = (log["numbers"].astype(numpy.float64) @ draw.normal(size=NUMBERS), alone, pairs)
    logit = _MEAN + _SPREAD * sum(
        share**0.5 * (effect - effect.mean()) / effect.std()
        for share, effect in zip(_SHARES, effects, strict=True)
    )
    truth = 1 / (1 + numpy.exp(-logit))
    log["label"] = draw.random(rows) < truth
    return SyntheticClicks(log, truth)
