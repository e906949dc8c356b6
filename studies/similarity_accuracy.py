"""Our similarity and SimiGrad's cosine of two halves, against the true similarity.

python -m studies.similarity_accuracy --data DIR
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from bigbatch.log.atomic_files import write_atomically
from bigbatch.log.chart import Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.series_style import NEUTRAL
from bigbatch.statistics.meter import GradientMeter
from studies.markdown_tables import Row, show
from studies.synthetic_gradients import (
    SIMILARITIES,
    Population,
    measure_step,
    populations,
    synthetic,
)

_TRIALS = 600

_COUNTS = (2, 4, 8, 16, 32, 64)  # k


@dataclass(frozen=True)
class Comparison:
    """Two estimates of one similarity."""

    population: str
    near: float  # the similarity that N was chosen for
    micro_batches: int
    samples: int
    truth: float  # phi = 1 / (1 + 2 B_simple / N)
    similarities: list[float]  # from all pairs of micro-batches, one per trial
    halves: list[float]  # cosines of the two halves, one per trial

    def error(self, estimates: Sequence[float]) -> float:
        """Root of the mean squared error."""
        return math.sqrt(fmean((estimate - self.truth) ** 2 for estimate in estimates))

    def row(self) -> Row:
        """The row of the table."""
        numbers = {"truth": self.truth}
        for name, estimates in (("similarity", self.similarities), ("halves", self.halves)):
            numbers[f"{name} mean"] = fmean(estimates)
            numbers[f"{name} sd"] = stdev(estimates)
            numbers[f"{name} rmse"] = self.error(estimates)
        return {
            "population": self.population,
            "k": str(self.micro_batches),
            "N": str(self.samples),
            **{name: f"{number:.3f}" for name, number in numbers.items()},
        }


def compare(population: Population, trials: int) -> Iterator[Comparison]:
    """Both estimates with equal micro-batches, for every k that leaves a sample for each."""
    for near in SIMILARITIES:
        for count in _COUNTS:
            size = math.floor(population.samples_for(near) / count + 0.5)
            if size < 1:
                continue
            with GradientMeter(population.parameters(), half_batch_cosine=True) as meter:
                steps = [measure_step(meter, population, [size] * count) for _ in range(trials)]
            yield Comparison(
                population.name,
                near,
                count,
                size * count,
                population.similarity(size * count),
                [step.similarity for step in steps],
                [
                    math.nan if step.half_batch_cosine is None else step.half_batch_cosine
                    for step in steps
                ],
            )


def figure(comparisons: Sequence[Comparison]) -> list[Panel]:
    """Means and standard deviations by k, a panel for each population."""
    panels = []
    for name in dict.fromkeys(one.population for one in comparisons):
        series = []
        for near in SIMILARITIES:
            line = [one for one in comparisons if (one.population, one.near) == (name, near)]
            counts = [one.micro_batches for one in line]
            truths = [one.truth for one in line]
            series.append(Series("truth", counts, truths, style=NEUTRAL))
            estimates = {
                "similarity, all pairs": [one.similarities for one in line],
                "halves": [one.halves for one in line],
            }
            for style, (kind, values) in enumerate(estimates.items()):
                means = [fmean(one) for one in values]
                deviations = [stdev(one) for one in values]
                series.append(
                    Series(
                        kind,
                        [1.06 ** (2 * style - 1) * count for count in counts],
                        means,
                        low=[m - d for m, d in zip(means, deviations, strict=True)],
                        high=[m + d for m, d in zip(means, deviations, strict=True)],
                        bars=True,
                        markers=True,
                        style=style,
                    )
                )
        panels.append(Panel(f"similarity: {name}", "micro-batches", series, x_log=2))
    return panels


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each population."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with fashion-mnist/, for a real network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=_TRIALS, help="steps of each row")
    parser.add_argument("--figure", type=Path, help="SVG of means and deviations")
    parser.add_argument("--tiny", action="store_true", help="two steps of a small population")
    given = parser.parse_args(arguments)
    compared: list[Comparison] = []
    drawn_from = populations(given.seed, given.data)
    if given.tiny:
        drawn_from, given.trials = iter([synthetic("gaussian", None, 0, dimensions=200)]), 2
    for population in drawn_from:
        compared += (found := list(compare(population, given.trials)))
        show(f"two estimates, {given.trials} trials", [one.row() for one in found])
    if given.figure is not None:
        drawn = svg(figure(compared), columns=2, key=True, standalone=True)
        write_atomically(given.figure, drawn.encode())


if __name__ == "__main__":
    main()
