"""Our similarity next to SimiGrad's cosine of two halves, where the truth is known."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from bigbatch.bench.synthetic_gradients import SIMILARITIES, Population, measured, populations
from bigbatch.runs.curves import write_figure
from bigbatch.statistics.meter import GradientMeter

COLUMNS = (
    "population",
    "k",
    "N",
    "truth",
    "similarity mean",
    "similarity sd",
    "similarity rmse",
    "halves mean",
    "halves sd",
    "halves rmse",
)
TRIALS = 600

_COUNTS = (2, 4, 8, 16, 32, 64)  # k
_OURS, _THEIRS = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Comparison:
    """Two estimates of one similarity.

    Args:
        population: its name.
        near: the similarity about which N was chosen.
        micro_batches, samples: k and N.
        truth: phi = 1 / (1 + 2 B_simple / N).
        similarities: from all pairs of micro-batches, one a trial.
        halves: cosine of the two halves, one a trial.
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

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        figures = [self.truth]
        for estimates in (self.similarities, self.halves):
            figures += [fmean(estimates), stdev(estimates), self.error(estimates)]
        names = (self.population, str(self.micro_batches), str(self.samples))
        return (*names, *(f"{figure:.3f}" for figure in figures))


def run(seed: int = 0, trials: int = TRIALS, data: Path | None = None) -> Iterator[Comparison]:
    """Both estimates of the same steps, for each population one row a setting."""
    for population in populations(seed, data):
        yield from compare(population, trials)
        del population  # it is large, and the next one is made now


def compare(population: Population, trials: int) -> Iterator[Comparison]:
    """Equal micro-batches; left out where N has not one sample for each."""
    for near in SIMILARITIES:
        for count in _COUNTS:
            size = math.floor(population.samples_for(near) / count + 0.5)
            if size < 1:
                continue
            with GradientMeter(population.parameters(), half_batch_cosine=True) as meter:
                steps = [measured(meter, population, [size] * count) for _ in range(trials)]
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


def figure(rows: Sequence[Comparison], path: Path) -> None:
    """Draws means and standard deviations by k into a file, one panel a population."""
    names = list(dict.fromkeys(row.population for row in rows))
    drawing = Figure(figsize=(0.5 + 3.2 * len(names), 5), layout="constrained")
    panels = drawing.subplots(1, len(names), sharey=True, squeeze=False).flat
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, [row for row in rows if row.population == name])
        axes.set_title(name, fontsize=10, loc="left")
    drawing.axes[0].set_ylabel("similarity: mean and standard deviation", fontsize=8)
    lines, labels = drawing.axes[0].get_legend_handles_labels()
    drawing.legend(lines, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    write_figure(drawing, path, dpi=150)


def _panel(axes: Axes, rows: list[Comparison]) -> None:
    for number, near in enumerate(sorted({row.near for row in rows})):
        line = [row for row in rows if row.near == near]
        counts = [row.micro_batches for row in line]
        label = "truth" if number == 0 else None
        truths = [row.truth for row in line]
        axes.plot(counts, truths, color="#555555", linestyle="--", linewidth=1, label=label)
        for turn, color, what in ((-1, _OURS, "similarity, all pairs"), (1, _THEIRS, "halves")):
            lists = [row.similarities if turn < 0 else row.halves for row in line]
            axes.errorbar(
                [count * 1.06**turn for count in counts],
                [fmean(estimates) for estimates in lists],
                [stdev(estimates) for estimates in lists],
                color=color,
                marker="o",
                markersize=3,
                linewidth=0.9,
                capsize=2,
                label=what if number == 0 else None,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_COUNTS))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("micro-batches", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
