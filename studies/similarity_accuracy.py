"""Our similarity and SimiGrad's cosine of two halves, against the true similarity."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from bigbatch.log.curves import add_grid, write_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from bigbatch.statistics.meter import GradientMeter
from studies.synthetic_gradients import SIMILARITIES, Population, measure_step, populations
from studies.timing import Row

TRIALS = 600

_COUNTS = (2, 4, 8, 16, 32, 64)  # k
_OURS, _THEIRS = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Comparison:
    """Two estimates of one similarity.

    Args:
        population: name of the population.
        near: the similarity that N was chosen for.
        micro_batches, samples: k and N.
        truth: phi = 1 / (1 + 2 B_simple / N).
        similarities: estimates from all pairs of micro-batches, one per trial.
        halves: cosines of the two halves, one per trial.
    """

    population: str
    near: float
    micro_batches: int
    samples: int
    truth: float
    similarities: list[float]
    halves: list[float]

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


def run(seed: int = 0, trials: int = TRIALS, data: Path | None = None) -> Iterator[Comparison]:
    """Both estimates of the same steps, for every population and setting."""
    for population in populations(seed, data):
        yield from compare(population, trials)
        del population  # frees its memory before the next one is built


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


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes a figure of means and standard deviations by k, one panel per population."""
    names = list(dict.fromkeys(row.population for row in comparisons))
    figure = Figure(figsize=(0.5 + 3.2 * len(names), 5), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False).flat
    for axes, name in zip(panels, names, strict=True):
        _draw_panel(axes, [row for row in comparisons if row.population == name])
        axes.set_title(name, fontsize=10, loc="left")
    figure.axes[0].set_ylabel("similarity: mean and standard deviation", fontsize=8)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    write_figure(figure, path, dpi=150)


def _draw_panel(axes: Axes, comparisons: list[Comparison]) -> None:
    for number, near in enumerate(sorted({row.near for row in comparisons})):
        line = [row for row in comparisons if row.near == near]
        counts = [row.micro_batches for row in line]
        label = "truth" if number == 0 else None
        truths = [row.truth for row in line]
        axes.plot(counts, truths, color="#555555", linestyle="--", linewidth=1, label=label)
        for side, color, name in ((-1, _OURS, "similarity, all pairs"), (1, _THEIRS, "halves")):
            trials = [row.similarities if side < 0 else row.halves for row in line]
            axes.errorbar(
                [count * 1.06**side for count in counts],
                [fmean(estimates) for estimates in trials],
                [stdev(estimates) for estimates in trials],
                color=color,
                marker="o",
                markersize=3,
                linewidth=0.9,
                capsize=2,
                label=name if number == 0 else None,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_COUNTS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("micro-batches", fontsize=8)
    axes.tick_params(labelsize=8)
    add_grid(axes)
