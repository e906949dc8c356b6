"""Replays a run's log with other policies: the batch sizes that they choose, and their cost.

Gradient signal and noise are taken from the log as functions of the samples seen. That another
batch size would have led to other weights is neglected; docs/policies.md discusses it.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, repeat
from typing import Any

import numpy

from bigbatch.errors import RunError, SettingError
from bigbatch.log.chart import Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.curve_series import chosen_rows
from bigbatch.log.history import History, Table, counted_of, measured_rows, missing_text
from bigbatch.log.row_schema import Row
from bigbatch.policies.controller import Controller
from bigbatch.policies.goodput import LossTrend
from bigbatch.policies.lr_scaling import RULES
from bigbatch.policies.policy import Policy, TrainingState, needs_of
from bigbatch.policies.step_time import StepTime, StepTimes, TimedSize
from bigbatch.setting_types import Count, Kind
from bigbatch.statistics.noise_scale import GradientStatistics

_LOGGED = "the run itself"
_EQUAL = ("steps at equal progress", "samples at equal progress")
_COLUMNS = ("policy", "steps", "average batch", "seconds", "progress", *_EQUAL)
_SCALINGS = {str(name).lower(): rule for name, rule in RULES.items()}  # as a log names them
_BINS = 40  # bins of a run; progress in a bin is computed with the bin's mean noise scale


class Trace:
    """Signal and noise of a run as functions of samples seen, constant over each measured step.

    A step without a measurement has the values of the next measured step.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.samples: int = rows[-1]["samples"]
        self._row_ends = [row["samples"] for row in rows]
        measured = measured_rows(rows)
        ends = [row["samples"] for row in measured]
        self._ends = numpy.array([0, *ends[:-1], self.samples])
        values = numpy.array(
            [[row["grad_sqnorm"], row["grad_variance"]] for row in measured], dtype=float
        )
        integrals = values * numpy.diff(self._ends)[:, None]
        self._integrals = numpy.vstack([numpy.zeros(2), integrals.cumsum(0)])

    def mean(self, low: float, high: float, batch_size: float) -> GradientStatistics:
        """Mean signal and noise between two numbers of samples, for a step of this batch size."""
        signal, noise = (
            float(numpy.diff(numpy.interp([low, high], self._ends, integral))[0]) / (high - low)
            for integral in self._integrals.T
        )
        return GradientStatistics(
            signal, max(noise, 0.0), batch_size, self.rows[0]["micro_batches"]
        )

    def bin_mean(self, sample: float, batch_size: float) -> GradientStatistics:
        """The mean over that fortieth of the run in which a sample lies."""
        width = self.samples / _BINS
        low = min(sample // width, _BINS - 1) * width
        return self.mean(low, low + width, batch_size)

    def row(self, samples: int) -> Row:
        """The logged step after which at least this number of samples had been seen."""
        return self.rows[min(bisect_left(self._row_ends, samples), len(self.rows) - 1)]

    def longest_epoch(self) -> int:
        """Samples of the longest pass over the data."""
        ends: list[int] = [0]
        ends += ([*rows][-1]["samples"] for _, rows in groupby(self.rows, lambda row: row["epoch"]))
        return max(high - low for low, high in pairwise(ends))


def time_steps(rows: list[Row]) -> tuple[TimedSize, ...]:
    """Times of a log's steps by batch size.

    The time of an evaluation is logged with the step after it, so that step is left out; so is a
    step during which the clock went back, or before which rows are missing.
    """
    timed = [
        (row, previous)
        for previous, row in pairwise(rows)
        if previous["metrics"] is None and row["step"] == previous["step"] + 1
    ]
    kinds = [row["grad_sqnorm"] is not None for row, _ in timed]
    kind = sum(kinds) > len(kinds) / 2  # measured, or not: what most steps are
    times = StepTimes(max_age=None)
    for (row, previous), measured in zip(timed, kinds, strict=True):
        if measured == kind:
            times.add(row["batch_size"], row["elapsed_seconds"] - previous["elapsed_seconds"])
    return times.sizes


def fit_time(rows: list[Row], times: tuple[TimedSize, ...]) -> StepTime:
    """The time of a step; all of it counts as per sample if batch sizes differ too little."""
    if (time := StepTime.fit(times)) is not None:
        return time
    samples = rows[-1]["samples"]
    mean = samples / rows[-1]["step"]
    return StepTime(0.0, rows[-1]["elapsed_seconds"] / samples, mean, mean)


@dataclass(frozen=True)
class Trajectory:
    """The steps of one training over the samples of the log."""

    name: str  # of the policy that chose the batch sizes
    ends: list[int]  # samples seen after each step
    batch_sizes: list[int]

    def progress(self, trace: Trace) -> float:
        """Sum of 1 / (1 + B_simple / B) over the steps; a step without noise counts as 1.

        Source:
            McCandlish et al. 2018 (arXiv 1812.06162), section 2; docs/policies.md.
        """
        shares = (
            trace.bin_mean(end - batch_size / 2, batch_size).generalization_ratio()
            for end, batch_size in zip(self.ends, self.batch_sizes, strict=True)
        )
        return sum(share for share in shares if share == share)  # nan: no gradient, no progress


@dataclass(frozen=True)
class Replay:
    """A logged run, and the trajectories of other policies over its samples."""

    history: History
    trace: Trace
    time: StepTime
    logged: Trajectory
    replayed: list[Trajectory]


def replay(history: History, policies: dict[str, Policy], **options: Any) -> Replay:
    """Replays each policy over the samples of a logged run.

    A policy starts at its own `batch_size`, or at that of the run. Its batch is at most an epoch
    and at least one sample per micro-batch of the log. It observes the log's signal and noise over
    the samples of the batch.

    Args:
        history: the logged run.
        policies: the policies, by the names in the table.
        options: options of `Controller`, the same for all policies.
    Raises:
        RunError: no step of the run was measured, or a policy follows the scheduled learning rate
            and the log does not tell it.
        SettingError: an option out of range, or a policy needs step times that the log has not.
    """
    if not measured_rows(history.rows):
        raise RunError(f"{history.path}: no step was measured, so there is nothing to replay")
    following = [name for name, p in policies.items() if needs_of(p).lr_decay]
    decays = lr_decays(history) if following else None
    for name in following:
        if decays is None:
            raise RunError(
                f"{history.path}: {name} follows the scheduled learning rate, which a log tells "
                "for lr_scaling of sqrt, linear or none alone, of bigbatch train, and with a row "
                "for every step; leave it out"
            )
    rows = [
        row | {"lr_decay": decay}
        for row, decay in zip(history.rows, decays or repeat(None), strict=False)
        if not row["skipped"]
    ]
    batch_sizes = [row["batch_size"] for row in rows]
    ends = list(accumulate(batch_sizes))  # without the samples of skipped steps
    trace = Trace([row | {"samples": end} for row, end in zip(rows, ends, strict=True)])
    logged = Trajectory(_LOGGED, ends, batch_sizes)
    times = time_steps(history.rows)
    replayed = [
        _replay_policy(name, policy, trace, times, options, counted_of([history]))
        for name, policy in policies.items()
    ]
    return Replay(history, trace, fit_time(history.rows, times), logged, replayed)


def lr_decays(history: History) -> list[float] | None:
    """The scheduled learning rate of each step over the largest so far; None if it is unknown.

    The log has the rates in force: the scheduled ones times the factors that follow from the batch
    size and from the decision before.
    """
    settings = history.settings
    scaling = _SCALINGS.get(str(settings.get("lr_scaling")))
    base_batch: Any = settings.get("base_batch")
    factors: list[Any] = [1.0, *(row.get("next_lr_factor") for row in history.rows[:-1])]
    known = base_batch in Kind(Count) and all(factors)
    known = known and all(None not in row["lr"] for row in history.rows)
    if scaling is None or not known or missing_text([history]):
        return None
    rates = [
        max(row["lr"]) / (scaling(row["batch_size"], base_batch, None) * factor)
        for row, factor in zip(history.rows, factors, strict=True)
    ]
    peaks = accumulate(rates, max)
    return [rate / peak if peak else 1.0 for rate, peak in zip(rates, peaks, strict=True)]


def _replay_policy(
    name: str,
    policy: Policy,
    trace: Trace,
    times: tuple[TimedSize, ...],
    options: dict[str, Any],
    unit: Any,
) -> Trajectory:
    first: int = trace.rows[0]["batch_size"]
    start = needs_of(policy).batch_size or first
    min_batch: int = min(row["micro_batches"] for row in measured_rows(trace.rows))
    controller = Controller(
        policy, start, min_batch=min_batch, max_batch=trace.longest_epoch(), **options
    )
    controller.require_unit(unit)
    trajectory, trend = Trajectory(name, [], []), LossTrend()
    samples = 0
    while samples < trace.samples:
        batch_size = min(controller.decision.batch_size, trace.samples - samples)
        statistics = trace.mean(samples, samples + batch_size, batch_size)
        samples += batch_size
        trajectory.ends.append(samples)
        trajectory.batch_sizes.append(batch_size)
        row = trace.row(samples)
        trend.add(batch_size, math.nan if row["loss"] is None else row["loss"])
        state = TrainingState(
            target_batch_size=0,
            batch_size=batch_size,
            samples=samples,
            steps=len(trajectory.ends),
            epoch=row["epoch"],
            lr_decay=trace.row(samples + 1)["lr_decay"],
            step_times=times,
            loss_trend=trend.trend,
        )
        decision = controller.next(statistics, state)
        if decision.trial:
            raise SettingError(f"{name} cannot be replayed on this log: {decision.reason}")
    return trajectory


def table_of_replay(replay: Replay) -> Table:
    """One row for the run itself and for each policy, with its cost."""
    samples, rows = replay.trace.samples, []
    logged_progress = replay.logged.progress(replay.trace)
    for trajectory in (replay.logged, *replay.replayed):
        progress, steps = trajectory.progress(replay.trace), len(trajectory.ends)
        factor = logged_progress / progress if progress > 0 else None
        seconds = replay.time.seconds(trajectory.batch_sizes)
        numbers = f"{steps:,.0f}", f"{samples / steps:,.0f}", f"{seconds:,.1f}", f"{progress:,.1f}"
        equal = ("-" if factor is None else f"{factor * n:,.0f}" for n in (steps, samples))
        rows.append((trajectory.name, *numbers, *equal))
    return Table(_COLUMNS, rows)


def time_in_words(replay: Replay) -> str:
    """The fitted time of a step, and the time that the run took."""
    fixed, per_sample = 1000 * replay.time.fixed, 1000 * replay.time.per_sample
    note = ", where batch sizes of 5 steps differ too little: all time counts as per sample"
    sizes_vary = replay.time.largest > replay.time.smallest
    return (
        f"a step takes {fixed:.3g} ms + {per_sample:.3g} ms a sample, fitted on the log"
        f"{'' if sizes_vary else note}; the run itself took "
        f"{replay.trace.rows[-1]['elapsed_seconds']:,.1f} s with its tests"
    )


def chart_of_replays(replays: list[Replay]) -> str:
    """The batch sizes of each policy as SVG, one panel per run."""
    panels = []
    for replay in replays:
        # neither steps at ends of epochs, nor last steps of policies, which end with the log
        rows = chosen_rows(replay.trace.rows)
        ends, sizes = [row["samples"] for row in rows], [row["batch_size"] for row in rows]
        drawn = [Trajectory(_LOGGED, ends, sizes)]
        for one in replay.replayed:
            last = max(1, len(one.ends) - 1)
            drawn.append(Trajectory(one.name, one.ends[:last], one.batch_sizes[:last]))
        series = [
            Series(one.name, one.ends, one.batch_sizes, kind="step", style=number)
            for number, one in enumerate(drawn)
        ]
        counted = counted_of([replay.history])
        title = f"{replay.history.label}: batch size, {counted}"
        panels.append(Panel(title, counted, series, y_log=2, size=(640, 300)))
    return svg(panels, key=True, standalone=True)
