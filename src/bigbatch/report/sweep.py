"""What a sweep found: one row a point, the best of what was tuned, and what no point beats."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.report.config import read_sweep, read_trainings
from bigbatch.report.metrics import History, Table, history_of, score_text, spread
from bigbatch.report.run_directory import find_runs


@dataclass(frozen=True)
class SweptPoint:
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
    runs: list[History]

    def scores(self, score: str) -> list[float]:
        """Of its runs; those without the score, or with none that is finite, are left out."""
        found = [run.last(score) for run in self.runs]
        return [one for one in found if one is not None]

    @property
    def average_batch(self) -> float:
        """Of its runs; nan before one is finished."""
        return fmean(run.average_batch for run in self.runs) if self.runs else math.nan


@dataclass(frozen=True)
class Swept:
    """What there is of a sweep.

    Args:
        name: of its directory.
        points: in the order of the grids.
        tuned: settings of which each point shows the best alone.
        higher_is_better: of the score that counts.
    """

    name: str
    points: list[SweptPoint]
    tuned: tuple[str, ...]
    higher_is_better: bool

    @property
    def score_names(self) -> list[str]:
        """Every score that was measured; the first counts."""
        runs = [run for point in self.points for run in point.runs]
        return list(dict.fromkeys(name for run in runs for name in run.scored()[-1]["scores"]))

    @property
    def score(self) -> str:
        """The one that counts; "score" before one is measured."""
        return next(iter(self.score_names), "score")

    @cached_property
    def shown(self) -> list[SweptPoint]:
        """A point for each combination of what is not tuned: the one of the best mean score.

        A point that lacks a score, of a run that failed or diverged say, is behind all that do not.
        """
        groups: dict[str, list[SweptPoint]] = {}
        for point in self.points:
            kept = {key: value for key, value in point.values.items() if key not in self.tuned}
            groups.setdefault(repr(kept), []).append(point)
        return [max(points, key=self._merit_on(points)) for points in groups.values()]

    def _merit_on(self, points: list[SweptPoint]) -> Callable[[SweptPoint], tuple[int, float]]:
        """By the score that counts for these points: another task of a sweep has another."""
        names = (run.score for point in points for run in point.runs)
        return partial(self._merit, next((name for name in names if name), self.score))

    def _merit(self, score: str, point: SweptPoint) -> tuple[int, float]:
        scores = point.scores(score)
        if not scores:
            return -point.planned, -math.inf
        return len(scores) - point.planned, fmean(scores) * (1 if self.higher_is_better else -1)

    @property
    def measured(self) -> list[SweptPoint]:
        """The shown points that have a score, by average batch."""
        found = [point for point in self.shown if point.scores(self.score)]
        return sorted(found, key=lambda point: point.average_batch)

    @property
    def front(self) -> list[SweptPoint]:
        """Points that no other beats: none has as large a batch and as good a score, or better.

        A point of which a run diverged is not among them: its mean is that of the others.
        """
        front: list[SweptPoint] = []
        best = -math.inf
        sound = [
            point for point in self.measured if len(point.scores(self.score)) == len(point.runs)
        ]
        for point in reversed(sound):
            merit = fmean(point.scores(self.score)) * (1 if self.higher_is_better else -1)
            if merit > best:
                best = merit
                front.insert(0, point)
        return front

    @property
    def title(self) -> str:
        """How to read the table."""
        most = max(point.planned for point in self.points)
        title = f"mean ± standard deviation over {most} seeds" if most > 1 else "one seed a point"
        if not self.tuned:
            return title
        names = " and ".join(self.tuned)
        first = {run.score: None for point in self.points for run in point.runs if run.score}
        chosen_on = " or ".join(first) or self.score
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
                *_numbers(point, scores),
            )
            for point in self.shown
        ]
        columns = (*(keys or ["point"]), *scores, "average batch", "steps", "wall time", "runs")
        return Table(columns, rows)


def read_swept(path: Path) -> Swept | None:
    """What there is of the sweep at `path`; None for another study, or a run.

    Raises:
        RunError: nothing has begun, or a file is damaged.
    """
    about = read_sweep(path)
    if about is None:
        return None
    planned = [settings["arm"] for settings in read_trainings(path).values()]
    histories = [history_of(run) for run in find_runs(path)]
    points = [
        SweptPoint(
            name,
            values,
            planned.count(name),
            [run for run in histories if run.label == name and run.finished],
        )
        for name, values in about["points"].items()
    ]
    return Swept(path.resolve().name, points, tuple(about["tuned"]), about["higher_is_better"])


def keys_of(points: Iterable[SweptPoint]) -> list[str]:
    """What varies in any of the points."""
    return list(dict.fromkeys(key for point in points for key in point.values))


def shown_text(value: Any) -> str:
    """A value in a table or a figure."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(point: SweptPoint, scores: list[str]) -> tuple[str, ...]:
    """What was measured at a point, as the table has it."""
    runs = point.runs
    count = f"{len(runs)} of {point.planned}" if len(runs) < point.planned else str(len(runs))
    if not runs:
        return (*["nothing yet"] * (len(scores) + 3), count)
    return (
        *(score_text([run.last(score) for run in runs]) for score in scores),
        spread([run.average_batch for run in runs], 0),
        spread([run.steps for run in runs], 0),
        f"{spread([run.rows[-1]['seconds'] for run in runs], 1)} s",
        count,
    )


def as_json(sweep: Swept) -> dict[str, Any]:
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


def _of_run(run: History) -> dict[str, Any]:
    return {
        "seed": run.settings["seed"],
        "scores": run.scored()[-1]["scores"],
        "average_batch": run.average_batch,
        "steps": run.steps,
        "seconds": run.rows[-1]["seconds"],
    }


def as_csv(sweep: Swept) -> str:
    """One row a run."""
    keys, scores = keys_of(sweep.points), sweep.score_names
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["point", *keys, "seed", *scores, "average_batch", "steps", "seconds"])
    for point in sweep.points:
        for run in map(_of_run, point.runs):
            values = [point.values.get(key, "") for key in keys]
            measured = [run["scores"].get(score) for score in scores]
            rest = [run["average_batch"], run["steps"], run["seconds"]]
            out.writerow([point.name, *values, run["seed"], *measured, *rest])
    return text.getvalue()
