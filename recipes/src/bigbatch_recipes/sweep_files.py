"""All runs of a sweep as texts for its files, sweep.json and sweep.csv."""

import csv
import io
from typing import Any

from bigbatch.log.paired_differences import Differences
from bigbatch.log.row_schema import finite
from bigbatch_recipes.sweep_results import SweepPoint, SweepResults, SweepRun

_NUMBERS = ("average_batch", "steps", "skipped", "elapsed_seconds", "diverged")


def as_json(sweep: SweepResults) -> dict[str, Any]:
    """All points with their runs, for sweep.json."""
    front, shown, differences = sweep.front, sweep.shown, sweep.differences()
    return {
        "name": sweep.name,
        "score": sweep.score,
        "higher_is_better": sweep.higher_is_better,
        "tuned": list(sweep.tuned),
        "reference": differences and differences.reference,
        "points": [
            {
                "name": point.name,
                "values": dict(point.values),
                "planned": point.planned,
                "shown": point in shown,
                "on_front": point in front,
                "difference": _difference_as_json(differences, point),
                "runs": [_run_as_json(run) for run in point.runs],
                "tuning": [_run_as_json(run) for run in point.tuning],
            }
            for point in sweep.points
        ],
    }


def _difference_as_json(differences: Differences | None, point: SweepPoint) -> Any:
    """The difference of a shown point from the reference; None for another point."""
    if differences is None or point.name not in differences.arms:
        return None
    one = differences.arms[point.name]
    low, high = one.interval or (None, None)
    return {
        "mean": one.center,
        "low": finite(low),
        "high": finite(high),
        "level": one.level,
        "pairs": len(one.by_seed),
        "missing": one.missing,
        "result": one.result,
    }


def _run_as_json(run: SweepRun) -> dict[str, Any]:
    numbers = {name: finite(getattr(run, name)) for name in _NUMBERS}
    return {"seed": run.seed, "metrics": dict(run.scores), **numbers}


def as_csv(sweep: SweepResults) -> str:
    """One row per run, for sweep.csv; `difference` is that from the reference's run of its seed."""
    keys, scores, differences = sweep.keys, sweep.score_names, sweep.differences()
    arms = differences.arms if differences else {}
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["point", *keys, "seed", *scores, *_NUMBERS, "difference"])
    for point in sweep.points:
        values = [point.values.get(key, "") for key in keys]
        for run in point.runs:
            run_scores = [run.scores.get(score) for score in scores]
            numbers = [finite(getattr(run, name)) for name in _NUMBERS]
            difference = arms[point.name].by_seed.get(run.seed) if point.name in arms else None
            out.writerow([point.name, *values, run.seed, *run_scores, *numbers, difference])
    return text.getvalue()
