"""How often the intervals hold the truth, where it is known."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import fmean, median

import torch

from bigbatch.bench.synthetic_gradients import (
    SIMILARITIES,
    Population,
    backwards,
    measured,
    populations,
)
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics

TRIALS = 200
LEVELS = (0.5, 0.68, 0.8, 0.9, 0.95, 0.99)  # nominal
COLUMNS = (
    "population",
    "interval for",
    "sizes",
    "k",
    "N",
    "truth",
    *(f"at {level:g}" for level in LEVELS),
    "truth below",
    "truth above",
    "median width",
)

_DETAILED = 0.9  # the level of the last three columns
_COUNTS = (3, 4, 8, 16, 64)  # k
_WINDOW, _WINDOW_COUNT, _WINDOW_SIMILARITY = 16, 4, 0.3  # steps; k; phi
_HALVING = 2 * _WINDOW  # steps in which a drifting signal halves

_Ends = dict[float, list[tuple[float, float]]]  # by level


@dataclass(frozen=True)
class Coverage:
    """Intervals of one kind and the similarity that they should hold.

    Similarity and noise scale are one interval, so that both hold the truth or neither.

    Args:
        population: its name.
        covers: what the truth is that of: one step, a window, or the present end of one.
        sizes: how n_d are spread.
        micro_batches, samples: k and N of a step.
        truth: phi.
        intervals: by nominal coverage, (low, high) of phi, one a trial.
    """

    population: str
    covers: str
    sizes: str
    micro_batches: int
    samples: int
    truth: float
    intervals: Mapping[float, list[tuple[float, float]]]

    def below(self, level: float) -> float:
        """Share of the trials in which the truth lies below the interval."""
        return fmean(self.truth < low for low, _ in self.intervals[level])

    def above(self, level: float) -> float:
        """Share of the trials in which it lies above."""
        return fmean(self.truth > high for _, high in self.intervals[level])

    def covered(self, level: float) -> float:
        """Share of the trials in which the interval holds it."""
        return 1 - self.below(level) - self.above(level)

    def width(self, level: float) -> float:
        """Median of high - low."""
        return median(high - low for low, high in self.intervals[level])

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        details = (self.below, self.above, self.width)
        shares = [self.covered(level) for level in LEVELS]
        shares += [detail(_DETAILED) for detail in details]
        return (
            self.population,
            self.covers,
            self.sizes,
            str(self.micro_batches),
            str(self.samples),
            f"{self.truth:.3f}",
            *(f"{share:.3f}" for share in shares),
        )


def run(seed: int = 0, trials: int = TRIALS, data: Path | None = None) -> Iterator[Coverage]:
    """Coverage of intervals of all `LEVELS`, for each population one row a setting."""
    for population in populations(seed, data):
        yield from of_steps(population, seed, trials)
        yield of_window(population, trials)
        yield from of_drift(population, trials)
        del population  # it is large, and the next one is made now


def of_steps(population: Population, seed: int, trials: int) -> Iterator[Coverage]:
    """Intervals of single steps, with equal and with ragged micro-batches.

    Where N would be less than two samples a micro-batch it is those, and phi is what that gives.
    """
    draw = torch.Generator().manual_seed(seed)
    for spread in ("equal", "ragged"):
        for count in _COUNTS:
            wanted = [max(2 * count, population.samples_for(phi)) for phi in SIMILARITIES]
            cut = [
                equal(samples, count) if spread == "equal" else ragged(samples, count, draw)
                for samples in wanted
            ]
            for n in {sum(sizes): sizes for sizes in cut}.values():
                truth = population.similarity(sum(n))
                ends = _of_each_level(population, n, trials)
                yield Coverage(population.name, "step", spread, count, sum(n), truth, ends)


def of_window(population: Population, trials: int) -> Coverage:
    """Intervals of a running average whose truth stands still, taken two windows apart."""
    n = equal(population.samples_for(_WINDOW_SIMILARITY), _WINDOW_COUNT)
    window = _WINDOW * sum(n)
    averages = {level: NoiseAverage(window, confidence=level) for level in LEVELS}
    ends: _Ends = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters()) as meter:
        for number in range(2 * _WINDOW * (trials + 1)):
            step = measured(meter, population, n)
            for level, average in averages.items():
                smooth = average.update(step)
                if number >= 2 * _WINDOW and (number + 1) % (2 * _WINDOW) == 0:
                    ends[level].append(_ends(smooth))
    truth = population.similarity(sum(n))
    return Coverage(population.name, "window", "equal", len(n), sum(n), truth, ends)


def of_drift(population: Population, trials: int) -> Iterator[Coverage]:
    """The same where the signal halves in two windows, down to the population's own.

    Once for the truth averaged as the window averages, and once for that of the last step.
    """
    n = equal(population.samples_for(_WINDOW_SIMILARITY), _WINDOW_COUNT)
    pulls = [2 ** (left / _HALVING) for left in reversed(range(3 * _WINDOW))]
    window = _WINDOW * sum(n)
    ends: _Ends = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters()) as meter:
        for _ in range(trials):
            steps = [measured(meter, population, n, pull) for pull in pulls]
            for level in LEVELS:
                average = NoiseAverage(window, confidence=level)
                ends[level].append(_ends([average.update(step) for step in steps][-1]))
    weights = [math.exp(-left / _WINDOW) for left in reversed(range(3 * _WINDOW))]
    pulled = sum(map(mul, weights, pulls)) / sum(weights)
    for covers, pull in (("window, drifting", pulled), ("its last step", 1.0)):
        truth = population.similarity(sum(n), pull)
        yield Coverage(population.name, covers, "equal", len(n), sum(n), truth, ends)


def equal(samples: float, count: int) -> list[int]:
    """Sizes of equal micro-batches, nearest to so many samples."""
    return [max(1, round(samples / count))] * count


def ragged(samples: float, count: int, draw: torch.Generator) -> list[int]:
    """Sizes about in proportion to 1 ... k, in any order, none below 1."""
    order = torch.randperm(count, generator=draw).tolist()
    total = count * (count + 1) / 2
    return [max(1, round(samples * (place + 1) / total)) for place in order]


def _of_each_level(population: Population, sizes: Sequence[int], trials: int) -> _Ends:
    """Intervals of steps of these sizes, those of all levels from the same backwards."""
    ends: _Ends = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters(), confidence=_DETAILED) as meter:
        for _ in range(trials):
            backwards(meter.source.parameters, population, sizes)
            totals = meter.totals(meter.measure(sizes).tolist())
            for level, of_level in ends.items():
                meter.confidence = level
                of_level.append(_ends(meter.statistics(totals)))
            meter.source.restart()
            meter.next_step()
    return ends


def _ends(step: GradientStatistics) -> tuple[float, float]:
    ends = step.similarity_interval
    assert ends is not None
    return ends
