"""How often confidence intervals contain the true similarity, where that is known.

python -m studies.coverage --data DIR
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import fmean, median

import torch

from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from studies.markdown_tables import Row, show
from studies.synthetic_gradients import (
    SIMILARITIES,
    Population,
    accumulate_gradients,
    measure_step,
    populations,
    synthetic,
)

_TRIALS = 200
LEVELS = (0.5, 0.68, 0.8, 0.9, 0.95, 0.99)  # nominal coverages

_DETAILED = 0.9  # the level of the last three columns
_COUNTS = (3, 4, 8, 16, 64)  # k
_WINDOW, _WINDOW_COUNT, _WINDOW_SIMILARITY = 16, 4, 0.3  # steps; k; phi
_HALVING = 2 * _WINDOW  # steps in which a drifting signal halves

_Intervals = dict[float, list[tuple[float, float]]]  # by level


@dataclass(frozen=True)
class Coverage:
    """Intervals of one kind and the similarity that they should contain.

    The intervals of similarity and noise scale are one: both contain the truth or neither does.
    """

    population: str
    interval_for: str  # the steps that the truth describes: a step, a window, or its last step
    sizes: str  # distribution of n_d: "equal" or "ragged"
    micro_batches: int
    samples: int
    truth: float  # phi
    intervals: Mapping[float, list[tuple[float, float]]]  # of phi by level, one per trial

    def below(self, level: float) -> float:
        """Share of the trials in which the truth lies below the interval."""
        return fmean(self.truth < low for low, _ in self.intervals[level])

    def above(self, level: float) -> float:
        """Share of the trials in which the truth lies above the interval."""
        return fmean(self.truth > high for _, high in self.intervals[level])

    def covered(self, level: float) -> float:
        """Share of the trials in which the interval contains the truth."""
        return 1 - self.below(level) - self.above(level)

    def width(self, level: float) -> float:
        """Median width of the intervals."""
        return median(high - low for low, high in self.intervals[level])

    def row(self) -> Row:
        """The row of the table."""
        return {
            "population": self.population,
            "interval for": self.interval_for,
            "sizes": self.sizes,
            "k": str(self.micro_batches),
            "N": str(self.samples),
            "truth": f"{self.truth:.3f}",
            **{f"at {level:g}": f"{self.covered(level):.3f}" for level in LEVELS},
            "truth below": f"{self.below(_DETAILED):.3f}",
            "truth above": f"{self.above(_DETAILED):.3f}",
            "median width": f"{self.width(_DETAILED):.3f}",
        }


def step_coverage(population: Population, seed: int, trials: int) -> Iterator[Coverage]:
    """Coverage of intervals of single steps, with equal and with ragged micro-batches.

    N is at least two samples per micro-batch, and phi is that of this N.
    """
    generator = torch.Generator().manual_seed(seed)
    for kind in ("equal", "ragged"):
        for count in _COUNTS:
            step_samples = [max(2 * count, population.samples_for(phi)) for phi in SIMILARITIES]
            step_sizes = [
                equal_sizes(samples, count)
                if kind == "equal"
                else ragged_sizes(samples, count, generator)
                for samples in step_samples
            ]
            for sizes in {sum(sizes): sizes for sizes in step_sizes}.values():
                samples = sum(sizes)
                truth = population.similarity(samples)
                intervals = _step_intervals(population, sizes, trials)
                yield Coverage(population.name, "step", kind, count, samples, truth, intervals)


def window_coverage(population: Population, trials: int) -> Coverage:
    """Coverage of intervals of a running average of constant truth, taken two windows apart."""
    sizes = equal_sizes(population.samples_for(_WINDOW_SIMILARITY), _WINDOW_COUNT)
    samples = sum(sizes)
    averages = {level: NoiseAverage(_WINDOW * samples, confidence=level) for level in LEVELS}
    intervals: _Intervals = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters()) as meter:
        for number in range(2 * _WINDOW * (trials + 1)):
            step = measure_step(meter, population, sizes)
            for level, average in averages.items():
                smooth = average.update(step)
                if number >= 2 * _WINDOW and (number + 1) % (2 * _WINDOW) == 0:
                    intervals[level].append(_interval(smooth))
    truth = population.similarity(samples)
    return Coverage(population.name, "window", "equal", len(sizes), samples, truth, intervals)


def drift_coverage(population: Population, trials: int) -> Iterator[Coverage]:
    """Coverage of intervals of a running average whose signal halves in two windows.

    The signal ends at the population's own. One row has the truth averaged as the window averages,
    the other that of the last step.
    """
    sizes = equal_sizes(population.samples_for(_WINDOW_SIMILARITY), _WINDOW_COUNT)
    samples = sum(sizes)
    ages = range(3 * _WINDOW - 1, -1, -1)  # steps before the last one
    factors = [2 ** (age / _HALVING) for age in ages]
    intervals: _Intervals = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters()) as meter:
        for _ in range(trials):
            steps = [measure_step(meter, population, sizes, factor) for factor in factors]
            for level in LEVELS:
                average = NoiseAverage(_WINDOW * samples, confidence=level)
                intervals[level].append(_interval([average.update(step) for step in steps][-1]))
    weights = [math.exp(-age / _WINDOW) for age in ages]
    mean_factor = sum(map(mul, weights, factors)) / sum(weights)
    for name, factor in (("window, drifting", mean_factor), ("its last step", 1.0)):
        truth = population.similarity(samples, factor)
        yield Coverage(population.name, name, "equal", len(sizes), samples, truth, intervals)


def equal_sizes(samples: float, count: int) -> list[int]:
    """Sizes of `count` equal micro-batches, whose sum is nearest to `samples`."""
    return [max(1, round(samples / count))] * count


def ragged_sizes(samples: float, count: int, generator: torch.Generator) -> list[int]:
    """Sizes about in proportion to 1 ... k, in random order, none below 1."""
    order = torch.randperm(count, generator=generator).tolist()
    total = count * (count + 1) / 2
    return [max(1, round(samples * (place + 1) / total)) for place in order]


def _step_intervals(population: Population, sizes: Sequence[int], trials: int) -> _Intervals:
    """Intervals of steps with these micro-batches; the same gradients serve all levels."""
    intervals: _Intervals = {level: [] for level in LEVELS}
    with GradientMeter(population.parameters(), confidence=_DETAILED) as meter:
        for _ in range(trials):
            accumulate_gradients(meter.source.parameters, population, sizes)
            totals = meter.totals(meter.measure(sizes).tolist())
            for level in LEVELS:
                meter.confidence = level
                intervals[level].append(_interval(meter.statistics(totals)))
            meter.source.restart()
            meter.next_step()
    return intervals


def _interval(statistics: GradientStatistics) -> tuple[float, float]:
    interval = statistics.similarity_interval
    assert interval is not None
    return interval


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each population."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with fashion-mnist/, for a real network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=_TRIALS, help="steps of each row")
    parser.add_argument("--tiny", action="store_true", help="two steps of a small population")
    given = parser.parse_args(arguments)
    found = populations(given.seed, given.data)
    if given.tiny:
        found, given.trials = iter([synthetic("gaussian", None, 0, dimensions=200)]), 2
    for population in found:
        measured = [
            *step_coverage(population, given.seed, given.trials),
            window_coverage(population, given.trials),
            *drift_coverage(population, given.trials),
        ]
        show(f"coverage of intervals, {given.trials} trials", [one.row() for one in measured])


if __name__ == "__main__":
    main()
