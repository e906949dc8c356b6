"""Losses of two runs against time and samples, and how much sooner one has the other's loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

_WINDOWS = 40  # means of the loss over a run, at most
_STEPS = 4  # that a mean needs at least
FULL = _WINDOWS * _STEPS  # steps that all of them need
_FEWEST = 8  # means that a comparison needs
_LEVELS = 9  # losses at which runs are compared
_CERTAIN = 0.9  # share of pairs, of the first and of the last quarter of the means, that must fall
_LIKELY = 0.8  # likewise, in the later half


@dataclass(frozen=True)
class LossCurve:
    """The steps of a run."""

    batch_size: int
    seed: int
    seconds: Numbers  # at the end of each step
    samples: Numbers  # likewise
    losses: Numbers  # of each step
    rates: Numbers  # likewise, of the first parameter group

    def means(self, window: float) -> "tuple[Numbers, Numbers, Numbers]":
        """Seconds, samples and loss, each a mean over so many samples; the rest is left out."""
        parts = np.floor((self.samples - self.samples[0] / 2) / window).astype(int)
        whole = parts < int(self.samples[-1] / window)
        counts = np.bincount(parts[whole])
        sums = (
            np.bincount(parts[whole], x[whole]) for x in (self.seconds, self.samples, self.losses)
        )
        seconds, samples, losses = (total / counts for total in sums)
        return seconds, samples, losses

    def until(self, samples: float) -> "LossCurve":
        """The steps until so many samples."""
        columns = (self.seconds, self.samples, self.losses, self.rates)
        parts = (column[self.samples <= samples] for column in columns)
        return LossCurve(self.batch_size, self.seed, *parts)


@dataclass(frozen=True)
class Gain:
    """Time and samples of one run until it has the loss of another, relative to that one's."""

    time: float
    samples: float


def window_of(curves: Sequence[LossCurve]) -> float:
    """Samples over which the losses of runs are smoothed: alike, so that they stay comparable."""
    least = min(float(curve.samples[-1]) for curve in curves)
    return max(least / _WINDOWS, _STEPS * max(curve.batch_size for curve in curves))


def gain(present: LossCurve, tried: LossCurve) -> Gain | str:
    """Compares two runs at losses of the later half of the one that ends higher.

    Losses are means over windows of the same number of samples, made monotone by isotonic
    regression, and compared at 9 times: the geometric mean of 9 ratios. Where losses no longer fall
    in the later half of the runs, the earlier half alone is compared.

    Returns:
        The gain, or why there is none.
    """
    window = window_of([present, tried])
    both = [curve.means(window) for curve in (present, tried)]
    if min(len(losses) for *_, losses in both) < _FEWEST:
        return "the runs have too few steps to compare their losses; --try-for makes them longer"
    if not all(np.isfinite(losses).all() for *_, losses in both):
        return "the loss was not finite"
    by_step = [float(curve.losses[:_STEPS].mean()) for curve in (present, tried)]
    by_sample = [float(losses[0]) for *_, losses in both]
    if _is_sum(present, tried, by_step) and _is_sum(present, tried, by_sample):
        return "the loss grows with the batch, as a sum over samples does, so none can be compared"
    if not all(_falls(losses, _CERTAIN) for *_, losses in both):
        return "the loss did not fall by more than its noise; --try-for makes runs longer"
    if not all(_falls(losses[len(losses) // 2 :], _LIKELY) for *_, losses in both):
        half = window * min(len(losses) for *_, losses in both) / 2
        earlier = gain(present.until(half), tried.until(half))
        is_early = isinstance(earlier, str)
        return "the loss fell early alone, in too few steps to compare" if is_early else earlier
    falling = [_falling(*one) for one in both]
    slow = max((0, 1), key=lambda i: falling[i][2][-1])
    seconds, _, losses = falling[slow]
    times = np.linspace(seconds[-1] / 2, seconds[-1], _LEVELS)
    levels = np.interp(times, seconds, losses)
    if levels[0] > falling[1 - slow][2][0]:
        return "the runs have no loss in common"
    time, number = (
        [float(np.mean(np.log(np.interp(-levels, -one[2], one[axis])))) for one in falling]
        for axis in (0, 1)
    )
    return Gain(math.exp(time[1] - time[0]), math.exp(number[1] - number[0]))


def rates_follow(present: LossCurve, tried: LossCurve, factor: float) -> bool:
    """Whether rates differ by this factor, up to a quarter, at the same samples.

    That is looked at over the later nine tenths of the run that has fewer samples.
    """
    end = min(present.samples[-1], tried.samples[-1])
    places = np.linspace(end / 10, end, _WINDOWS)
    rates = [np.interp(places, one.samples, one.rates) for one in (present, tried)]
    known = np.isfinite(rates[0]) & np.isfinite(rates[1]) & (rates[0] != 0)
    ratios = rates[1][known] / rates[0][known] / factor
    return bool(((ratios > 0.8) & (ratios < 1.25)).mean() > _CERTAIN) if len(ratios) else True


def _is_sum(present: LossCurve, tried: LossCurve, first: Sequence[float]) -> bool:
    """Whether the first losses differ by more than the root of the batch sizes' ratio."""
    factor, ratio = tried.batch_size / present.batch_size, first[1] / first[0]
    return factor != 1 and ratio > 0 and math.log(ratio) / math.log(factor) > 0.5


def _falls(losses: Numbers, share: float) -> bool:
    """Whether means of the first quarter are above those of the last, in this share of pairs."""
    quarter = len(losses) // 4
    above = losses[:quarter, None] > losses[None, -quarter:]
    return bool(above.mean() > share)


def _falling(seconds: Numbers, samples: Numbers, losses: Numbers) -> "tuple[Numbers, ...]":
    """The nearest curve that falls everywhere: neighbours that rise are put together."""
    blocks: list[Numbers] = []  # of seconds, samples, loss, windows
    for point in zip(seconds, samples, losses, strict=True):
        blocks.append(np.array([*point, 1.0]))
        while len(blocks) > 1 and blocks[-1][2] >= blocks[-2][2]:
            last, before = blocks.pop(), blocks.pop()
            total = last[3] + before[3]
            joined = (last * last[3] + before * before[3]) / total
            joined[3] = total
            blocks.append(joined)
    return tuple(np.array(blocks).T[:3])
