"""What other policies would have chosen on a finished run's log, and at what cost.

Signal and noise are taken as functions of the samples seen, as the log has them: that another batch
would have moved the weights otherwise is left out. docs/policies.md says what that means.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, cycle, groupby, pairwise
from pathlib import Path
from statistics import fmean, linear_regression, pstdev
from typing import Any

import numpy
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bigbatch.errors import RunError
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import Policy, TrainingState
from bigbatch.runs.curves import COLORS, FIGURE_FORMATS, dress, require_writable, write_figure
from bigbatch.runs.metrics import History
from bigbatch.runs.run_directory import Row
from bigbatch.statistics.noise_scale import GradientStatistics

ITSELF = "the run itself"
COLUMNS = ("policy", "steps", "average\nbatch", "seconds", "progress")
EQUAL = ("steps\nat equal\nprogress", "samples\nat equal\nprogress")

_BINS = 40  # of a run; the noise scale that progress counts with is that of one such part


class Trace:
    """Signal and noise of a run as functions of samples seen, constant over each measured step.

    A step without a measurement has that of the next one.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.samples: int = rows[-1]["samples"]
        self._row_ends = [row["samples"] for row in rows]
        measured = [
            row
            for row in rows
            if row["grad_sqnorm"] is not None and row["grad_variance"] is not None
        ]
        ends = [row["samples"] for row in measured]
        self._ends = numpy.array([0, *ends[:-1], self.samples])
        values = numpy.array([[row["grad_sqnorm"], row["grad_variance"]] for row in measured])
        areas = values * numpy.diff(self._ends)[:, None]
        self._areas = numpy.vstack([numpy.zeros(2), areas.cumsum(0)])

    def mean(self, low: float, high: float, batch_size: float) -> GradientStatistics:
        """Mean signal and noise between two numbers of samples, as a step of this batch sees."""
        between = [low, high]
        signal, noise = (
            float(numpy.diff(numpy.interp(between, self._ends, area))[0]) / (high - low)
            for area in self._areas.T
        )
        return GradientStatistics(
            signal, max(noise, 0.0), batch_size, self.rows[0]["micro_batches"]
        )

    def part(self, sample: float, batch_size: float) -> GradientStatistics:
        """The mean over the 40th part of the run that holds a sample."""
        width = self.samples / _BINS
        low = min(sample // width, _BINS - 1) * width
        return self.mean(low, low + width, batch_size)

    def row(self, samples: int) -> Row:
        """The logged step in which so many samples had been seen."""
        return self.rows[min(bisect_left(self._row_ends, samples), len(self.rows) - 1)]

    def longest_epoch(self) -> int:
        """Samples of the longest pass over the data."""
        ends: list[int] = [0]
        ends += ([*rows][-1]["samples"] for _, rows in groupby(self.rows, lambda row: row["epoch"]))
        return max(high - low for low, high in pairwise(ends))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of B samples: fixed + per_sample B."""

    fixed: float
    per_sample: float
    distinguished: bool = True

    @classmethod
    def fit(cls, rows: list[Row]) -> "StepTime":
        """Least squares over a log, neither part below 0.

        Where batch sizes scatter by less than a tenth, all is per sample.

        A step after which scores were measured lends its successor that time, so the
        successor is left out; so is a step during which the clock went back.
        """
        points = [
            (after["batch_size"], after["elapsed_seconds"] - before["elapsed_seconds"])
            for before, after in pairwise(rows)
            if before["metrics"] is None and after["elapsed_seconds"] > before["elapsed_seconds"]
        ]
        if not points:
            return cls(0.0, rows[-1]["elapsed_seconds"] / rows[-1]["samples"], distinguished=False)
        sizes, seconds = zip(*points, strict=True)
        distinguished = pstdev(sizes) > fmean(sizes) / 10
        if distinguished:
            slope, fixed = linear_regression(sizes, seconds)
            if slope < 0:
                return cls(fmean(seconds), 0.0)
            if fixed >= 0:
                return cls(fixed, slope)
        slope = linear_regression(sizes, seconds, proportional=True).slope
        return cls(0.0, slope, distinguished)

    def of(self, batches: list[int]) -> float:
        """Seconds of steps of these sizes."""
        return self.fixed * len(batches) + self.per_sample * sum(batches)


@dataclass(frozen=True)
class Walk:
    """The steps of one training over the log's samples.

    Args:
        name: of what chose them.
        ends: samples seen after each step.
        batches: samples of each step.
    """

    name: str
    ends: list[int]
    batches: list[int]

    def progress(self, trace: Trace) -> float:
        """sum of 1 / (1 + B_simple / B): in steps of a batch so large that it has no noise.

        Source:
            McCandlish et al. 2018 (arXiv 1812.06162), section 2; docs/policies.md.
        """
        middles = (end - batch / 2 for end, batch in zip(self.ends, self.batches, strict=True))
        shares = (
            trace.part(middle, batch).generalization_ratio()
            for middle, batch in zip(middles, self.batches, strict=True)
        )
        return sum(share for share in shares if share == share)  # nan: no gradient, no progress


@dataclass(frozen=True)
class Replay:
    """A run and what other policies would have made of it."""

    history: History
    trace: Trace
    time: StepTime
    itself: Walk
    others: list[Walk]


def replay(history: History, policies: dict[str, Policy], **options: Any) -> Replay:
    """Walks each policy over the samples of a logged run.

    Each starts at its own `batch_size`, or where the run did. At every step it takes the batch it
    wants, at most an epoch and at least what can be cut as the log's steps were, and sees the log's
    signal and noise over those samples.

    Args:
        history: the run.
        policies: by the names they are shown under.
        options: of `Controller`, the same for all.
    Raises:
        RunError: nothing was measured in the run.
        SettingError: an option out of range.
    """
    rows = history.rows
    if not history.measured:
        raise RunError(f"{history.path}: no step was measured, so there is nothing to replay")
    batches = [row["batch_size"] for row in rows if not row["skipped"]]
    ends = list(accumulate(batches))  # without the samples of skipped steps
    kept = (row for row in rows if not row["skipped"])
    trace = Trace([row | {"samples": end} for row, end in zip(kept, ends, strict=True)])
    itself = Walk(ITSELF, ends, batches)
    others = [_walk(name, policy, trace, options) for name, policy in policies.items()]
    return Replay(history, trace, StepTime.fit(rows), itself, others)


def _walk(name: str, policy: Policy, trace: Trace, options: dict[str, Any]) -> Walk:
    first: int = trace.rows[0]["batch_size"]
    start = getattr(policy, "batch_size", first)
    smallest: int = min(row["micro_batches"] for row in trace.rows)
    controller = Controller(
        policy, start, min_batch=smallest, max_batch=trace.longest_epoch(), **options
    )
    walk = Walk(name, [], [])
    done = 0
    while done < trace.samples:
        batch = min(controller.decision.batch_size, trace.samples - done)
        noise = trace.mean(done, done + batch, batch)
        done += batch
        walk.ends.append(done)
        walk.batches.append(batch)
        epoch, steps = trace.row(done)["epoch"], len(walk.batches)
        controller.next(noise, TrainingState(0, batch, controller.base_batch, done, steps, epoch))
    return walk


def table_of_replay(found: Replay) -> Table:
    """Costs of the run itself and of each policy, in 80 columns where names allow."""
    title = f"{found.history.label}: {found.trace.samples:,} samples"
    table = Table(*COLUMNS, *EQUAL, title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    goal = found.itself.progress(found.trace)
    for walk in (found.itself, *found.others):
        progress, steps = walk.progress(found.trace), len(walk.batches)
        share = goal / progress if progress > 0 else float("nan")
        numbers = (steps, found.trace.samples / steps)
        table.add_row(
            walk.name,
            *(f"{number:,.0f}" for number in numbers),
            f"{found.time.of(walk.batches):,.1f}",
            f"{progress:,.1f}",
            *(_or_dash(share * number) for number in (steps, found.trace.samples)),
        )
    return table


def _or_dash(number: float) -> str:
    return f"{number:,.0f}" if number == number else "-"


def time_in_words(found: Replay) -> str:
    """The model of a step's time, and how far it is from the run's own."""
    fixed, per_sample = 1000 * found.time.fixed, 1000 * found.time.per_sample
    return (
        f"a step takes {fixed:.3g} ms + {per_sample:.3g} ms a sample, fitted on the log"
        + ", whose batch sizes are nearly one: all time counts as per sample"
        * (not found.time.distinguished)
        + f"; the run itself took {found.trace.rows[-1]['elapsed_seconds']:,.1f} s with its tests"
    )


def save_figure(replays: list[Replay], out: Path) -> None:
    """Draws the batch sizes that each policy would have chosen, one panel a run.

    Raises:
        SettingError: the ending is neither .png nor .svg.
        RunError: the file is somebody else's, or cannot be written.
    """
    require_writable(out, FIGURE_FORMATS)
    figure = Figure(figsize=(9, 0.8 + 3.4 * len(replays)), layout="constrained")
    for axes, found in zip(figure.subplots(len(replays), squeeze=False).flat, replays, strict=True):
        dress(axes, f"{found.history.label}: batch size, samples", "samples", base=2)
        *others, black = COLORS
        style = {"drawstyle": "steps-pre", "linewidth": 1.1, "alpha": 0.75}
        axes.plot(found.itself.ends, found.itself.batches, color=black, label=ITSELF, **style)
        for walk, color in zip(found.others, cycle(others), strict=False):
            axes.plot(walk.ends, walk.batches, color=color, label=walk.name, **style)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    write_figure(figure, out)
