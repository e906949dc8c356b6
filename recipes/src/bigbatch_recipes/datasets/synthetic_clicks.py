"""A generated click log whose true probabilities are known.

Categories have a Zipf distribution. The logit of a click is a sum of effects of the numbers, of
each category, and of each pair of categories, through the product of their hidden factors; the
label is drawn from that probability. So the true probabilities have the best expected AUC.
"""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from bigbatch_recipes.datasets.click_log import CATEGORIES, CLICK, NUMBERS, Packed

_SEED = 0  # one log for every seed and arm
_FACTORS = 4
_SPREAD = 1.6  # standard deviation of the logit
_MEAN = -1.5  # of the logit: about a quarter of the rows is clicked
_SHARES = (0.4, 0.4, 0.2)  # of its variance: numbers, categories, pairs of categories
_MIN_CATEGORIES, _MAX_CATEGORIES = 4, 1_000  # of a column
_ZIPF = 1.1


@dataclass(frozen=True)
class SyntheticClicks:
    """Packed rows, and the true probability of each click."""

    rows: Packed  # rows in Criteo's packed form
    truth: NDArray[numpy.float64]  # probabilities, (rows,)


def click_log(rows: int) -> SyntheticClicks:
    """Draws so many rows: the same ones in every call, but not the first rows of a longer log.

    Example:
        >>> log = click_log(1000)
        >>> bool(0.15 < log.rows["label"].mean() < 0.35)
        True
    """
    rng = numpy.random.default_rng(_SEED)
    log = numpy.empty(rows, CLICK)
    log["numbers"] = numpy.log1p(rng.poisson(rng.lognormal(1.0, 1.0, (rows, NUMBERS))))
    effect_of_one = numpy.zeros(rows)
    total, squares = numpy.zeros((rows, _FACTORS)), numpy.zeros(rows)
    for column, count in enumerate(
        numpy.geomspace(_MIN_CATEGORIES, _MAX_CATEGORIES, CATEGORIES).astype(int)
    ):
        frequencies = 1.0 / numpy.arange(1, count + 1) ** _ZIPF
        codes = rng.choice(count, rows, p=frequencies / frequencies.sum())
        log["codes"][:, column] = codes
        effect_of_one += rng.normal(size=count)[codes]
        factors = rng.normal(size=(count, _FACTORS))[codes]
        total += factors
        squares += (factors**2).sum(1)
    pairs = ((total**2).sum(1) - squares) / 2  # sum of products of factors over pairs of columns
    numbers = log["numbers"].astype(numpy.float64) @ rng.normal(size=NUMBERS)
    effects = (numbers, effect_of_one, pairs)
    logit = _MEAN + _SPREAD * sum(
        share**0.5 * (effect - effect.mean()) / effect.std()
        for share, effect in zip(_SHARES, effects, strict=True)
    )
    truth = 1 / (1 + numpy.exp(-logit))
    log["label"] = rng.random(rows) < truth
    return SyntheticClicks(log, truth)
