"""What a sweep found: one row a point, the best of what was tuned, and what no point beats."""

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.errors import RunError
from bigbatch.runs.metrics import History, Table, finite, history_of
from bigbatch.runs.run_config import read_sweep, read_trainings
from bigbatch.runs.run_directory import RunDirectory
from bigbatch.runs.seed_summary import SeedSummary

_DRAWN = 60  # runs at most whose curves are on one page; more would hide each other


@dataclass(frozen=True)
class SweepRun:
    """What a finished run came to, without the rows of its log.

    Args:
        directory: that it lies in.
        seed: that it was started with.
        scores: that were measured last, by name; None for what was no finite number.
        average_batch, steps, skipped: as of `History`.
        seconds: that it trained.
        diverged: whether it did.
    """

    directory: RunDirectory
    seed: int
    scores: Mapping[str, float | None]
    average_batch: float
    steps: int
    skipped: int
    seconds: float
    diverged: bool


@dataclass(frozen=True)
class SweepPoint:
    """One combination of values with its runs.

    Args:
        name: of it.
        values: what varies.
        planned: runs that it has when all are done.
        runs: that are finished.
    """

    name: str
    values: Mapping[str, Any]
    planned: int
    runs: list[SweepRun]

    def scores(self, score: str) -> list[float]:
        """Of its runs; those without the score, or with none that is finite, are left out."""
        found = [run.scores.get(score) for run in self.runs]
        return [one for one in found if one is not None]

    def sound(self, score: str) -> int:
        """How many of its runs are finished, have the score and did not diverge."""
        return sum(run.scores.get(score) is not None and not run.diverged for run in self.runs)

    def complete(self, score: str) -> bool:
        """Whether all of its runs are so."""
        return self.sound(score) == self.planned

    @property
    def average_batch(self) -> float:
        """Of its runs; nan before one is finished."""
        return fmean(run.average_batch for run in self.runs) if self.runs else math.nan


@dataclass(frozen=True)
class SweepResults:
    """What there is of a sweep.

    Args:
        path: its directory.
        begun: runs with a step in their log.
        points: in the order of the grids.
        tuned: settings of which each point shows the best alone.
        higher_is_better: of the score that counts.
        summary: of the seeds of a point.
    """

    path: Path
    begun: list[RunDirectory]
    points: list[SweepPoint]
    tuned: tuple[str, ...]
    higher_is_better: bool
    summary: SeedSummary

    @property
    def name(self) -> str:
        """Of its directory."""
        return self.path.resolve().name

    @property
    def score_names(self) -> list[str]:
        """Every score that was measured; the first counts."""
        runs = [run for point in self.points for run in point.runs]
        return list(dict.fromkeys(name for run in runs for name in run.scores))

    @property
    def score(self) -> str:
        """The one that counts; "score" before one is measured."""
        return next(iter(self.score_names), "score")

    @cached_property
    def shown(self) -> list[SweepPoint]:
        """A point for each combination of what is not tuned: the one of the best score over seeds.

        A point of which a run failed, diverged or has no score is behind all of which none did.
        """
        groups: dict[str, list[SweepPoint]] = {}
        for point in self.points:
            kept = {key: value for key, value in point.values.items() if key not in self.tuned}
            groups.setdefault(repr(kept), []).append(point)
        return [max(points, key=self._merit_on(points)) for points in groups.values()]

    def _merit_on(self, points: list[SweepPoint]) -> Callable[[SweepPoint], tuple[int, float]]:
        """By the score that counts for these points: another task of a sweep has another."""
        names = (name for point in points for run in point.runs for name in run.scores)
        return partial(self._merit, next(names, self.score))

    def _merit(self, score: str, point: SweepPoint) -> tuple[int, float]:
        scores = point.scores(score)
        if not scores:
            return -point.planned, -math.inf
        sign = 1 if self.higher_is_better else -1
        return point.sound(score) - point.planned, sign * self.summary.middle(scores)

    @property
    def measured(self) -> list[SweepPoint]:
        """The shown points that have a score, by average batch, of one batch by merit."""
        found = [
            point
            for point in self.shown
            if point.scores(self.score) and math.isfinite(point.average_batch)
        ]
        return sorted(found, key=lambda one: (one.average_batch, self._merit(self.score, one)))

    @property
    def front(self) -> list[SweepPoint]:
        """Points that no other beats: none has as large a batch and as good a score, or better.

        A point of which a run failed or diverged is not among them: its mean is that of the others.
        """
        front: list[SweepPoint] = []
        best = -math.inf
        for point in reversed([one for one in self.measured if one.complete(self.score)]):
            _, merit = self._merit(self.score, point)
            if merit > best:
                best = merit
                front.insert(0, point)
        return front

    @property
    def drawn(self) -> list[RunDirectory]:
        """The runs whose curves a page has: all that have begun, of a large sweep the front's."""
        if len(self.begun) <= _DRAWN:
            return self.begun
        of_front = [run.directory for point in self.front for run in point.runs]
        return (of_front or self.begun)[:_DRAWN]

    @property
    def title(self) -> str:
        """How to read the table."""
        most = max(point.planned for point in self.points)
        title = f"{self.summary.words} over {most} seeds" if most > 1 else "one seed a point"
        if not self.tuned:
            return title
        names = " and ".join(self.tuned)
        runs = [run for point in self.points for run in point.runs]
        chosen_on = " or ".join(dict.fromkeys(next(iter(run.scores)) for run in runs)) or self.score
        return (
            f"{title}; {names}: the best of each point, chosen on the {chosen_on} that is shown, "
            "which flatters it"
        )

    def table(self) -> Table:
        """One row a point: what varies, scores, average batch, steps, wall time."""
        keys = keys_of(self.points)
        scores = self.score_names or ["score"]
        rows = [
            (
                *(shown_text(point.values.get(key, "")) for key in keys),
                *([] if keys else [point.name]),
                *_numbers(point, scores, self.summary),
            )
            for point in self.shown
        ]
        columns = (*(keys or ["point"]), *scores, "average batch", "steps", "wall time", "runs")
        return Table(columns, rows)


def read_sweep_results(path: Path) -> SweepResults | None:
    """What there is of the sweep at `path`; None for another study, or a run.

    A run that is damaged is left out, and a note says so.

    Raises:
        RunError: study.yaml is damaged.
    """
    about = read_sweep(path)
    if about is None:
        return None
    trainings = read_trainings(path)
    begun: list[RunDirectory] = []
    ended: dict[str, list[SweepRun]] = {name: [] for name in about["points"]}
    for name, settings in trainings.items():
        history = _history(path / name)
        if history is not None and history.rows:
            begun.append(RunDirectory.open(path / name))
            if history.finished:
                ended[settings["arm"]].append(_came_to(history, settings["seed"], begun[-1]))
    planned = [settings["arm"] for settings in trainings.values()]
    points = [
        SweepPoint(name, values, planned.count(name), ended[name])
        for name, values in about["points"].items()
    ]
    return SweepResults(
        path,
        begun,
        points,
        tuple(about["tuned"]),
        about["higher_is_better"],
        SeedSummary.of(trainings.values()),
    )


def _history(place: Path) -> History | None:
    """The log at `place`; None where there is none, or it is damaged."""
    if not place.exists():
        return None
    try:
        return history_of(RunDirectory.open(place))
    except RunError as error:
        warnings.warn(f"{place.name} is left out: {error}", stacklevel=3)
        return None


def _came_to(history: History, seed: int, directory: RunDirectory) -> SweepRun:
    return SweepRun(
        directory,
        seed,
        history.scored_rows[-1]["metrics"],
        history.average_batch,
        history.steps,
        history.skipped,
        history.rows[-1]["elapsed_seconds"],
        bool(history.divergence),
    )


def keys_of(points: Iterable[SweepPoint]) -> list[str]:
    """What varies in any of the points."""
    return list(dict.fromkeys(key for point in points for key in point.values))


def shown_text(value: Any) -> str:
    """A value in a table or a figure."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(point: SweepPoint, scores: list[str], summary: SeedSummary) -> tuple[str, ...]:
    """What was measured at a point, as the table has it."""
    runs = point.runs
    count = f"{len(runs)} of {point.planned}" if len(runs) < point.planned else str(len(runs))
    diverged = sum(run.diverged for run in runs)
    if not runs:
        return (*["nothing yet"] * (len(scores) + 3), count)
    return (
        *(summary.of_scores([run.scores.get(score) for run in runs]) for score in scores),
        summary.text([run.average_batch for run in runs], 0),
        summary.of_steps([run.steps for run in runs], [run.skipped for run in runs]),
        f"{summary.text([run.seconds for run in runs], 1)} s",
        count + f", {diverged} diverged" * bool(diverged),
    )


def as_json(sweep: SweepResults) -> dict[str, Any]:
    """Every point with its runs, and whether it is shown and on the front."""
    front, shown = sweep.front, sweep.shown
    return {
        "name": sweep.name,
        "score": sweep.score,
        "higher_is_better": sweep.higher_is_better,
        "tuned": list(sweep.tuned),
        "points": [
            {
                "name": point.name,
                "values": dict(point.values),
                "planned": point.planned,
                "shown": point in shown,
                "on_front": point in front,
                "runs": [_of_run(run) for run in point.runs],
            }
            for point in sweep.points
        ],
    }


def _of_run(run: SweepRun) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "metrics": dict(run.scores),
        "average_batch": finite(run.average_batch),
        "steps": run.steps,
        "skipped": run.skipped,
        "elapsed_seconds": run.seconds,
        "diverged": run.diverged,
    }


_NUMBERS = ("average_batch", "steps", "skipped", "elapsed_seconds", "diverged")


def as_csv(sweep: SweepResults) -> str:
    """One row a run."""
    keys, scores = keys_of(sweep.points), sweep.score_names
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["point", *keys, "seed", *scores, *_NUMBERS])
    for point in sweep.points:
        for run in map(_of_run, point.runs):
            values = [point.values.get(key, "") for key in keys]
            measured = [run["metrics"].get(score) for score in scores]
            rest = [run[name] for name in _NUMBERS]
            out.writerow([point.name, *values, run["seed"], *measured, *rest])
    return text.getvalue()
