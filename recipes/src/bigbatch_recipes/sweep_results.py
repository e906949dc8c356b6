"""Results of a sweep: its points, the best values of tuned settings, the Pareto front."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.errors import RunError
from bigbatch.log.history import (
    SUMMARY,
    History,
    Table,
    history_of,
    mean_text,
    missing_text,
    scores_text,
    steps_text,
)
from bigbatch.log.paired_differences import Differences, SeedScores, differences_between
from bigbatch_recipes.run_config import read_sweep

_MAX_CURVES = 60  # runs whose curves are on one page; more would overlap


@dataclass(frozen=True)
class SweepRun:
    """Results of a finished run, without the rows of its log."""

    path: Path  # the run directory
    seed: int  # the seed of the run
    scores: Mapping[str, float | None]  # the last scores, by name; None for one that was not finite
    average_batch: float  # average_batch, steps, skipped: the properties of `History`
    steps: int
    skipped: int
    elapsed_seconds: float  # seconds of training
    diverged: bool  # whether the run diverged
    lost_rows: bool  # whether its log lacks rows


@dataclass(frozen=True)
class SweepPoint:
    """One combination of values with its runs."""

    name: str  # name of the point
    values: Mapping[str, Any]  # values of the settings that vary
    seeds: list[int] = field(default_factory=list)  # of its runs, finished or not
    runs: list[SweepRun] = field(default_factory=list)  # the finished runs
    # finished runs of tuning seeds, which are not shown
    tuning: list[SweepRun] = field(default_factory=list)

    def scores(self, score: str) -> list[float]:
        """Finite values of a score over the runs."""
        return _finite_scores(self.runs, score)

    def missing(self, score: str) -> int:
        """Number of runs that are unfinished, lack a finite score, or diverged."""
        return len(self.seeds) - _valid(self.runs, score)

    def scores_by_seed(self, score: str) -> SeedScores:
        """A score of each seed; None for a run that `missing` counts."""
        valid = {run.seed: run.scores.get(score) for run in self.runs if not run.diverged}
        return {seed: valid.get(seed) for seed in self.seeds}

    @property
    def average_batch(self) -> float:
        """Mean over the finished runs; nan before the first."""
        return fmean(run.average_batch for run in self.runs) if self.runs else math.nan


def combinations_of(points: Iterable[SweepPoint], tuned: Sequence[str]) -> list[list[SweepPoint]]:
    """Points that differ in tuned settings alone, together."""
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        fixed = {key: value for key, value in point.values.items() if key not in tuned}
        groups.setdefault(repr(fixed), []).append(point)
    return list(groups.values())


def _finite_scores(runs: Sequence[SweepRun], score: str) -> list[float]:
    scores = [run.scores.get(score) for run in runs]
    return [value for value in scores if value is not None]


def _valid(runs: Sequence[SweepRun], score: str) -> int:
    """Number of runs with a finite score that did not diverge."""
    return sum(run.scores.get(score) is not None and not run.diverged for run in runs)


@dataclass(frozen=True)
class SweepResults:
    """Results of a sweep so far."""

    path: Path  # directory of the sweep
    begun: list[Path]  # directories of runs with a step in their log
    points: list[SweepPoint]  # all points, in the order of the grids
    tuned: tuple[str, ...]  # settings of which each point shows only the best value
    # seeds of the runs that choose it; none to choose by what is shown
    tuning_seeds: tuple[int, ...]
    higher_is_better: bool  # whether a higher main score is better

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    @property
    def keys(self) -> list[str]:
        """Names of the settings that vary."""
        return list(dict.fromkeys(key for point in self.points for key in point.values))

    @property
    def score_names(self) -> list[str]:
        """Names of all measured scores; the first is the main score."""
        runs = [run for point in self.points for run in point.runs]
        return list(dict.fromkeys(name for run in runs for name in run.scores))

    @property
    def score(self) -> str:
        """Name of the main score; "score" before one is measured."""
        return next(iter(self.score_names), "score")

    @cached_property
    def shown(self) -> list[SweepPoint]:
        """For each combination of settings that are not tuned, the point with the best score.

        A point with a run that failed, diverged or has no score is worse than one without.
        """
        return [self._best(points) for points in self._combinations]

    @property
    def _combinations(self) -> list[list[SweepPoint]]:
        return combinations_of(self.points, self.tuned)

    def _best(self, points: list[SweepPoint]) -> SweepPoint:
        """The best of these points by their main score, which may be another than the sweep's."""
        names = (n for point in points for run in self._choosing(point) for n in run.scores)
        score = next(names, self.score)
        return max(points, key=lambda point: self._rank(score, self._choosing(point)))

    def _choosing(self, point: SweepPoint) -> list[SweepRun]:
        """The runs of a point whose scores choose the best values of tuned settings."""
        return point.tuning if self.tuning_seeds else point.runs

    def _rank(self, score: str, runs: Sequence[SweepRun]) -> tuple[int, float]:
        """The sort key of a point with these runs; a larger one is better."""
        scores = _finite_scores(runs, score)
        sign = 1 if self.higher_is_better else -1
        return _valid(runs, score), sign * fmean(scores) if scores else -math.inf

    @property
    def at_edges(self) -> list[str]:
        """Points whose best value of a tuned number is the smallest or the largest in the grid."""
        found = []
        for points, best in zip(self._combinations, self.shown, strict=True):
            for key in self.tuned:
                values = [point.values[key] for point in points if key in point.values]
                numbers = {value for value in values if isinstance(value, int | float)}
                if len(numbers) > 1 and best.values[key] in (min(numbers), max(numbers)):
                    found.append(f"{best.name} ({key})")
        return found

    @property
    def measured(self) -> list[SweepPoint]:
        """The shown points with a score, sorted by average batch, then by score."""
        points = [
            point
            for point in self.shown
            if point.scores(self.score) and math.isfinite(point.average_batch)
        ]
        return sorted(points, key=lambda one: (one.average_batch, self._rank(self.score, one.runs)))

    @property
    def front(self) -> list[SweepPoint]:
        """The Pareto front: no other point has as large a batch and as good a score, or better.

        Points with a run that failed or diverged are excluded, as their mean is that of the rest.
        """
        front: list[SweepPoint] = []
        best = -math.inf
        for point in reversed([one for one in self.measured if not one.missing(self.score)]):
            _, signed_score = self._rank(self.score, point.runs)
            if signed_score > best:
                best = signed_score
                front.insert(0, point)
        return front

    @property
    def drawn(self) -> list[Path]:
        """The runs whose curves are on the page: all with a step, or those of the front if many."""
        if len(self.begun) <= _MAX_CURVES:
            return self.begun
        front_runs = [run.path for point in self.front for run in point.runs]
        return (front_runs or self.begun)[:_MAX_CURVES]

    @property
    def title(self) -> str:
        """The title of the table."""
        seeds = max(len(point.seeds) for point in self.points)
        title = f"{SUMMARY} over {seeds} seeds" if seeds > 1 else "one seed a point"
        if not self.tuned:
            return title
        names = " and ".join(self.tuned)
        if self.tuning_seeds:
            return (
                f"{title}; {names}: the best of each point, chosen on held-out training samples "
                f"with seeds {self.tuning_seeds[0]} to {self.tuning_seeds[-1]}"
            )
        runs = [run for point in self.points for run in point.runs]
        chosen_on = " or ".join(dict.fromkeys(next(iter(run.scores)) for run in runs)) or self.score
        return (
            f"{title}; {names}: the best of each point, chosen on the {chosen_on} that is shown, "
            "which flatters it"
        )

    def table(self) -> Table:
        """One row per point: varied settings, scores, average batch, steps, wall time."""
        keys = self.keys
        scores = self.score_names or ["score"]
        rows = [
            (
                *(value_text(point.values.get(key, "")) for key in keys),
                *([] if keys else [point.name]),
                *_result_cells(point, scores),
            )
            for point in self.shown
        ]
        columns = (*(keys or ["point"]), *scores, "average batch", "steps", "wall time", "runs")
        return Table(columns, rows)

    def differences(self, against: str | None = None) -> Differences | None:
        """Differences of the main score between the shown points; None for one point.

        Args:
            against: name of the reference, shown or not; None for the first shown point, also if
                no point has this name.
        """
        named = [point for point in self.points if point.name == against]
        reference = (named or self.shown)[0]
        points = [reference, *(point for point in self.shown if point is not reference)]
        scores = {point.name: point.scores_by_seed(self.score) for point in points}
        return differences_between(
            scores, self.score, reference.name, () if self.tuning_seeds else self.tuned
        )


def read_sweep_results(path: Path) -> SweepResults:
    """Results of the sweep at `path`; a damaged run is left out with a warning.

    Raises:
        RunError: no sweep is there, or its file is damaged.
    """
    trainings, sweep = read_sweep(path)
    tuning_seeds = tuple(sweep["tuning_seeds"])
    points = {name: SweepPoint(name, values) for name, values in sweep["points"].items()}
    begun: list[Path] = []
    for name, settings in trainings.items():
        point, seed = points[settings["arm"]], settings["seed"]
        tunes = seed in tuning_seeds
        if not tunes:
            point.seeds.append(seed)
        history = _read_history(path / name)
        if history is None or not history.rows:
            continue
        if not tunes:
            begun.append(path / name)
        if history.finished:
            (point.tuning if tunes else point.runs).append(_sweep_run(history, seed, path / name))
    return SweepResults(
        path,
        begun,
        list(points.values()),
        tuple(sweep["tuned"]),
        tuning_seeds,
        sweep["higher_is_better"],
    )


def _read_history(path: Path) -> History | None:
    """The history of the run at `path`; None where there is none, or it is damaged."""
    if not path.exists():
        return None
    try:
        return history_of(path)
    except RunError as error:
        warnings.warn(f"{path.name} is left out: {error}", stacklevel=3)
        return None


def _sweep_run(history: History, seed: int, path: Path) -> SweepRun:
    return SweepRun(
        path,
        seed,
        history.scored_rows[-1]["metrics"],
        history.average_batch,
        history.steps,
        history.skipped,
        history.rows[-1]["elapsed_seconds"],
        bool(history.divergence),
        bool(missing_text([history])),
    )


def value_text(value: Any) -> str:
    """The text of a setting's value in a table or a figure."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _result_cells(point: SweepPoint, scores: list[str]) -> tuple[str, ...]:
    """Cells of the scores of a point, its average batch, steps, wall time and number of runs."""
    runs = point.runs
    planned = len(point.seeds)
    count = f"{len(runs)} of {planned}" if len(runs) < planned else str(len(runs))
    diverged, incomplete = sum(run.diverged for run in runs), sum(run.lost_rows for run in runs)
    if not runs:
        return (*["nothing yet"] * (len(scores) + 3), count)
    return (
        *(scores_text([run.scores.get(score) for run in runs]) for score in scores),
        mean_text([run.average_batch for run in runs], 0),
        steps_text([run.steps for run in runs], [run.skipped for run in runs]),
        f"{mean_text([run.elapsed_seconds for run in runs], 1)} s",
        count
        + f", {diverged} diverged" * bool(diverged)
        + f", {incomplete} without all rows" * bool(incomplete),
    )
