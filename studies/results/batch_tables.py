"""Tables and figures of a comparison of batch sizes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

import numpy

from bigbatch.errors import RunError
from bigbatch.log.chart import Mark, Panel, Series
from bigbatch.log.paired_differences import PairedDifference, paired_difference
from bigbatch.log.series_style import NEUTRAL
from bigbatch.log.time_to_score import reaches
from studies.markdown_tables import Row, markdown_table
from studies.results.batch_comparisons import (
    DEVICES,
    DOUBLING,
    devices_text,
    equal_steps,
    replay_of,
)
from studies.results.comparison_log import ComparisonLog, LoggedRun

_MARGIN = {True: -1.0, False: 0.05}  # of the target, by whether a higher score is better
_EASIER = (2, 4)  # margins of further targets that the rule does not name


def base_of(log: ComparisonLog) -> str:
    """The first arm, a fixed batch: the reference of all others."""
    return str(next(iter(log.about["arms"])))


def target_of(log: ComparisonLog) -> float:
    """The target score: that of the first arm in tuning, less one point, or plus 0.05 bits."""
    return tuned_score(log, base_of(log)) + _MARGIN[log.higher_is_better]


def tuned_score(log: ComparisonLog, arm: str) -> float:
    """Mean main score of the tuning runs of an arm at the rate that was chosen.

    Raises:
        RunError: none of them has one.
    """
    scores = [run.main_score for run in log.tuning(arm) if run.lr == log.rate(arm)]
    if not (known := [score for score in scores if score is not None]):
        raise RunError(f"no tuning run of {arm} has a score; train again what failed")
    return fmean(known)


# times to a target


@dataclass(frozen=True)
class TargetTimes:
    """Modelled seconds of an arm's fresh runs to a target, by seed; None for one not reached."""

    seconds: Mapping[int, float | None]

    @property
    def reached(self) -> int:
        """Number of runs that reach the target."""
        return sum(value is not None for value in self.seconds.values())

    @property
    def median(self) -> float:
        """Median over all runs, with infinity for those that do not reach the target."""
        values = sorted(math.inf if one is None else one for one in self.seconds.values())
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        return (low + high) / 2

    @property
    def logs(self) -> dict[int, float | None]:
        """ln of the seconds."""
        return {seed: one and math.log(one) for seed, one in self.seconds.items()}


def to_target(run: LoggedRun, target: float, *, higher_is_better: bool) -> tuple[int, int] | None:
    """(steps, samples) at the first evaluation that reaches the target; None if none does."""
    for samples, steps, _, score in () if run.diverged else run.curve:
        if reaches(score, target, higher_is_better=higher_is_better):
            return steps, samples
    return None


def times_to(log: ComparisonLog, arm: str, target: float, devices: int) -> TargetTimes:
    """Modelled seconds of the fresh runs of an arm; runs that failed reach no target."""
    seconds: dict[int, float | None] = {}
    for run in log.fresh(arm):
        position = to_target(run, target, higher_is_better=log.higher_is_better)
        seconds[run.seed] = position and log.step_cost.seconds(*position, devices)
    return TargetTimes(seconds)


def fastest(log: ComparisonLog, target: float, devices: int) -> str:
    """The fixed batch with the least median time; of several, that which reaches it most often."""

    def order(arm: str) -> tuple[float, int]:
        times = times_to(log, arm, target, devices)
        return times.median, -times.reached

    return min(fixed_arms(log), key=order)


def fixed_arms(log: ComparisonLog) -> list[str]:
    """The fixed batches that were chosen before the run."""
    return [arm for arm in log.arms if arm.startswith("fixed ")]


def time_ratio(log: ComparisonLog, arm: str, target: float, devices: int) -> PairedDifference:
    """ln of an arm's time to the target over that of the fastest fixed batch, by seed."""
    reference = fastest(log, target, devices)
    own, other = (times_to(log, one, target, devices).logs for one in (arm, reference))
    return paired_difference(own, other)


def _timed_devices(log: ComparisonLog, target: float) -> tuple[int, ...]:
    """The numbers of devices; none if no fixed batch reaches the target."""
    is_reached = any(times_to(log, arm, target, 1).reached for arm in fixed_arms(log))
    return DEVICES if is_reached else ()


# tables


def tables(log: ComparisonLog) -> str:
    """The arms, their modelled times to the target, and the differences from their controls."""
    target, arms = target_of(log), log.arms
    fixed_part, per_sample = 1000 * log.step_cost.fixed, 1e6 * log.step_cost.per_sample
    words = f"Target: {log.score} {target:.2f}. Step of a plain loop: "
    words += f"{fixed_part:.2f} ms + {per_sample:.1f} us a sample."
    references = "No fixed batch reaches the target, so there are no times relative to one."
    if timed := _timed_devices(log, target):
        named = (f"{devices_text(n)}: {fastest(log, target, n)}" for n in timed)
        references = f"Fixed batches that the times are relative to: {'; '.join(named)}."
    return "\n\n".join(
        [
            words,
            _table_of_known([_arm_cells(log, arm, target) for arm in arms]),
            references,
            _table_of_known([_control_cells(log, arm) for arm in arms if replay_of(arm) in arms]),
            "Not in the rule, looked at afterwards: easier targets on 8 devices.",
            _table_of_known([_easier_cells(log, arm) for arm in arms]),
        ]
    )


def _easier_cells(log: ComparisonLog, arm: str) -> Row:
    """Times on 8 devices to targets that are further below the first arm's score in tuning."""
    cells = {"arm": arm}
    for factor in _EASIER:
        target = tuned_score(log, base_of(log)) + factor * _MARGIN[log.higher_is_better]
        reference = fastest(log, target, 8)
        cells[f"{target:.2f}, over {reference}"] = _ratio(time_ratio(log, arm, target, 8))
    return cells


def _arm_cells(log: ComparisonLog, arm: str, target: float) -> Row:
    runs = log.fresh(arm)
    valid = [run for run in runs if run.score(log.score) is not None]
    losses = [name for name in log.score_names if "loss" in name]
    digits = 2 + 2 * (not log.higher_is_better)
    return {
        "arm": arm,
        "rate": log.rate_text(arm),
        log.score: mean_cell(log.scores(arm).values(), digits),
        **{name: mean_cell(log.scores(arm, name).values(), 4) for name in losses},
        "steps": f"{fmean(run.steps for run in valid):,.0f}" if valid else "none",
        "batch": f"{fmean(run.average_batch for run in valid):,.0f}" if valid else "none",
        "reached": f"{times_to(log, arm, target, 1).reached} of {len(runs)}",
        "steps, samples to it": _position_cell(log, arm, target),
        **{
            f"time, {devices_text(devices)}": _ratio(time_ratio(log, arm, target, devices))
            for devices in DEVICES
        },
    }


def _position_cell(log: ComparisonLog, arm: str, target: float) -> str:
    """Mean steps and samples to the target, of the runs that reach it."""
    higher = log.higher_is_better
    found = [to_target(run, target, higher_is_better=higher) for run in log.fresh(arm)]
    if not (known := [position for position in found if position is not None]):
        return "none"
    return ", ".join(f"{fmean(values):,.0f}" for values in zip(*known, strict=True))


def _table_of_known(rows: Sequence[Row]) -> str:
    """A table without the columns that no row has a value in."""
    columns = [name for name in (rows or [{}])[0] if any(row[name] != "none" for row in rows)]
    return markdown_table([{name: row[name] for name in columns} for row in rows])


def _control_cells(log: ComparisonLog, arm: str) -> Row:
    """Differences from the controls."""
    others = {
        "its replay": replay_of(arm),
        "fixed, equal steps": equal_steps(arm),
        "doubling": DOUBLING,
        base_of(log): base_of(log),
    }
    return {"arm": arm} | {
        f"minus {name}": difference_cell(paired_difference(log.scores(arm), log.scores(other)), log)
        for name, other in others.items()
    }


def mean_cell(scores: Iterable[float | None], digits: int) -> str:
    """Mean and standard deviation of the values that are known, and the number of the others."""
    values = list(scores)
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    spread = stdev(known) if len(known) > 1 else 0.0
    lost = len(values) - len(known)
    return f"{fmean(known):.{digits}f} ± {spread:.{digits}f}" + f" ({lost} failed)" * bool(lost)


def _ratio(difference: PairedDifference) -> str:
    return _cell(difference, lambda value: f"{math.exp(value):.2f}")


def difference_cell(difference: PairedDifference, log: ComparisonLog) -> str:
    """Mean and interval of a difference of main scores, as `_cell` writes them."""
    digits = 2 if log.higher_is_better else 3
    return _cell(difference, lambda value: f"{value:+.{digits}f}")


def _cell(difference: PairedDifference, text_of: Callable[[float], str]) -> str:
    """Mean and interval, bold if it excludes 0; where pairs lack a value, their number instead.

    The pairs that have one are then those of the better runs.
    """
    if difference.center is None:
        return "none"
    text = text_of(difference.center)
    if difference.interval is not None:
        low, high = difference.interval
        text = f"{text} [{text_of(low)}, {text_of(high)}]"
        excludes_zero = low > 0 or high < 0
        text = f"**{text}**" if excludes_zero and not difference.missing else text
    pairs = f" ({len(difference.by_seed)} of {difference.pairs} pairs)"
    return text + pairs * bool(difference.missing)


# figures


def figure(log: ComparisonLog) -> list[Panel]:
    """For every arm: score less that of the first, and time to the target over the best fixed.

    Without the times where no fixed batch reaches the target. Points are hollow where they are of
    those seeds alone that reach it.
    """
    base, target = base_of(log), target_of(log)
    score = partial(_score_difference, log)
    panels = [_forest(log, f"{log.score}, less that of {base}", score, 0.0, float)]
    for devices in _timed_devices(log, target):
        title = f"time to the target over the best fixed batch's, {devices_text(devices)}"
        ratio = partial(time_ratio, log, target=target, devices=devices)
        panels.append(_forest(log, title, ratio, 1.0, math.exp))
    return panels


def _score_difference(log: ComparisonLog, arm: str) -> PairedDifference:
    return paired_difference(log.scores(arm), log.scores(base_of(log)))


def _forest(
    log: ComparisonLog,
    title: str,
    difference_of: Callable[[str], PairedDifference],
    equal: float,
    scale: Callable[[float], float],
) -> Panel:
    """A point with its 95 % interval for each arm, in a colour for each kind of arm."""
    arms = [arm for arm in log.arms if not arm.startswith("fixed, steps")]
    kinds: dict[str, list[int]] = {"fixed batches": [], "measured": [], "schedules, replays": []}
    for place, arm in enumerate(arms):
        scheduled = arm.startswith((DOUBLING, "replay"))
        kind = "schedules, replays" if scheduled else "measured"
        kinds["fixed batches" if arm.startswith("fixed") else kind].append(place)
    series = []
    for style, (kind, places) in enumerate(kinds.items(), start=NEUTRAL):
        known = [(place, difference_of(arms[place])) for place in places]
        shown = [(y, one, one.center) for y, one in known if one.center is not None]
        ends = [one.interval or (center, center) for _, one, center in shown]
        series.append(
            Series(
                kind,
                [scale(center) for *_, center in shown],
                [place for place, *_ in shown],
                kind="points",
                x_low=[scale(low) for low, _ in ends],
                x_high=[scale(high) for _, high in ends],
                hollow=[bool(one.missing) for _, one, _ in shown],
                style=style,
            )
        )
    return Panel(
        title,
        "mean and 95 % interval",
        series,
        x_log=2 if equal else None,
        y_names=arms,
        marks=[Mark("", x=equal)],
        size=(560, 60 + 18 * len(arms)),
    )


def score_over_steps(log: ComparisonLog, arms: Sequence[str]) -> list[Panel]:
    """The main score of arms against optimizer steps: mean and range over the seeds.

    Over those that neither failed nor diverged; no panel where an arm has none.
    """
    series = []
    for style, arm in enumerate(arms, start=NEUTRAL):
        runs = [run for run in log.fresh(arm) if run.score(log.score) is not None]
        if not runs:
            return []
        samples = [point[0] for point in runs[0].curve]
        steps = [fmean(_at(run, 1, x) for run in runs) for x in samples]
        scores = [[_at(run, 3, x) for run in runs] for x in samples]
        series.append(
            Series(
                f"{arm}, {steps[-1]:,.0f} steps",
                steps,
                [fmean(values) for values in scores],
                low=[min(values) for values in scores],
                high=[max(values) for values in scores],
                style=style,
            )
        )
    first, last = max(series[0].high[:1]), series[0].y[-1]
    highest = max(max(one.high) for one in series)
    return [
        Panel(
            log.score,
            "optimizer steps; every training sees the same samples",
            series,
            y_range=(first + 0.6 * (last - first), highest + 0.02 * (highest - first)),
            size=(640, 320),
        )
    ]


def _at(run: LoggedRun, column: int, samples: int) -> float:
    """A column of a run's curve at a number of samples, interpolated."""
    known = numpy.array([point for point in run.curve if point[3] is not None], dtype=float)
    return float(numpy.interp(samples, known[:, 0], known[:, column]))
