"""The history of a run, which its log has, and tables of histories."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from bigbatch.errors import RunError
from bigbatch.log.row_schema import (
    METRICS,
    SCHEMA,
    SCORES,
    SETTINGS,
    Row,
    parse_line,
    require_kinds,
    require_settings,
    require_step,
)

SUMMARY = "mean ± standard deviation"  # in a cell, of several runs
_ACCURACY = re.compile(r"(?i)(^|[^a-z])acc(uracy)?($|[^a-z])")
_COLUMNS = ("steps", "average batch", "samples", "wall time")
_MIN_LAST_STEPS = 3  # last steps of a short training
_HARMLESS_LOSS = 0.5  # a final loss below it is no sign of divergence
_END_FACTOR, _PEAK_FACTOR, _OFFSET = 2.0, 3.0, 1.0  # loss > factor * first loss + offset


def measured_rows(rows: list[Row]) -> list[Row]:
    """The steps whose gradients were measured, with a finite result."""
    return [
        row for row in rows if row["grad_sqnorm"] is not None and row["grad_variance"] is not None
    ]


@dataclass(frozen=True)
class History:
    """The log and the settings of one run."""

    path: Path  # directory of the run
    settings: dict[str, Any]
    rows: list[Row]  # one per step

    @property
    def label(self) -> str:
        """The arm of the study, or the name of the directory without its seed."""
        name = self.path.name.removesuffix(f"-seed{self.settings.get('seed')}")
        return str(self.settings.get("arm") or name)

    @property
    def target(self) -> float | None:
        """The similarity that the policy holds; None for another policy than SimiGrad."""
        is_simigrad = str(self.settings.get("policy")).lower().startswith("simigrad")
        return self.settings.get("target") if is_simigrad else None

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher main score is better."""
        return bool(self.settings.get("higher_is_better", True))

    @property
    def settings_without_seed(self) -> str:
        """The settings as text, equal for runs that differ only in their seed."""
        suffix = f"-seed{self.settings.get('seed')}"  # of the name of another run
        items = [item for item in self.settings.items() if item[0] != "seed"]
        return repr([(n, x.removesuffix(suffix) if isinstance(x, str) else x) for n, x in items])

    @property
    def finished(self) -> bool:
        """Whether the scores after the last epoch are there; True if `epochs` is no setting."""
        if not self.rows or "epochs" not in self.settings:
            return bool(self.rows)
        last = self.rows[-1]
        return last["epoch"] + 1 == self.settings["epochs"] and last["metrics"] is not None

    @property
    def steps(self) -> int:
        """Number of updates of the weights."""
        return self.rows[-1]["step"] - self.skipped if self.rows else 0

    @property
    def skipped(self) -> int:
        """Number of skipped steps, whose gradient was not finite."""
        return sum(row["skipped"] for row in self.rows)

    @property
    def average_batch(self) -> float:
        """Mean samples of an update; nan before the first."""
        if not self.steps:
            return math.nan
        skipped_samples = sum(row["batch_size"] for row in self.rows if row["skipped"])
        return float((self.rows[-1]["samples"] - skipped_samples) / self.steps)

    @property
    def _last_tenth(self) -> list[Row]:
        return self.rows[-max(_MIN_LAST_STEPS, len(self.rows) // 10) :]

    @property
    def final_loss(self) -> float | None:
        """Mean loss of a sample over the last tenth of the steps; None where none is known."""
        losses = [(row["loss"], row["batch_size"]) for row in self._last_tenth]
        known = [pair for pair in losses if pair[0] is not None]
        return fmean(*zip(*known, strict=True)) if known else None

    @property
    def divergence(self) -> str:
        """How the run diverged, in words; "" where it did not.

        `first` is the loss of the initial weights, `end` the median loss of the last tenth of all
        steps. A training has diverged where

            half of the last tenth was skipped or has no finite loss, or
            end > 2 first + 1, or
            any loss > 3 first + 1, and end >= first: it blew up and did not recover

        A training that learns nothing, or forgets a little of its initial weights, has not
        diverged: its loss stays near the first, or small.
        """
        last = self._last_tenth
        finite = [row["loss"] for row in last if row["loss"] is not None and not row["skipped"]]
        if last and 2 * len(finite) <= len(last):
            missing = len(last) - len(finite)
            return f"{missing} of its last {len(last)} steps had no finite gradient"
        if not last or self.rows[0]["loss"] is None:
            return ""
        first, end = self.rows[0]["loss"], median(finite)
        peak = max(row["loss"] for row in self.rows if row["loss"] is not None)
        blew_up = peak > _PEAK_FACTOR * first + _OFFSET and end >= max(first, _HARMLESS_LOSS)
        if first > 0 and (end > _END_FACTOR * first + _OFFSET or blew_up):
            return f"its loss began at {first:.3g}, rose to {peak:.3g} and ended at {end:.3g}"
        return ""

    @property
    def scored_rows(self) -> list[Row]:
        """The steps after which scores were measured."""
        return [row for row in self.rows if row["metrics"] is not None]

    @property
    def score(self) -> str | None:
        """Name of the main score, which is the first; None before one is measured."""
        return next((name for row in self.scored_rows for name in row["metrics"]), None)

    def last(self, score: str) -> float | None:
        """The last value of a score; None where it was not measured or is not finite."""
        values = [row["metrics"][score] for row in self.scored_rows if score in row["metrics"]]
        return values[-1] if values else None


def find_runs(path: Path | str) -> list[Path]:
    """The folder, if it has a log; else its subfolders that have one, by name.

    Raises:
        RunError: there is none.
    """
    folder = Path(path)
    _require_folder(folder)
    if (folder / METRICS).exists():
        return [folder]
    runs = sorted(log.parent for log in folder.glob(f"*/{METRICS}"))
    if not runs:
        raise RunError(
            f"{folder} has no {METRICS}, nor has a folder in it; name what bigbatch.RunLog or "
            'AdaptiveBatch(log="...") wrote'
        )
    return runs


def history_of(path: Path | str) -> History:
    """Reads the log of a run.

    Raises:
        RunError: a file is missing or damaged, or of another schema.
    """
    folder = Path(path)
    return History(folder.resolve(), read_settings(folder), _read_rows(folder / METRICS))


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run.

    Raises:
        RunError: the file is missing or damaged, or of another schema.
    """
    _require_folder(folder)
    file = folder / SETTINGS
    try:
        document = json.loads(file.read_bytes())
        schema, settings = document["schema"], document["settings"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise RunError(
            f"{file} cannot be read as the settings of a log ({type(error).__name__}); name the "
            "folder of a run, or restore the file from a copy"
        ) from None
    if schema != SCHEMA:
        raise RunError(
            f"{file} is of schema {shortened(schema)}, and {SCHEMA} is needed; read it with the "
            "release that wrote it"
        )
    require_settings(str(file), settings)
    return dict(settings)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        look = f"`ls {folder.parent}` shows what there is"
        raise RunError(f"there is no run directory {folder}; {look}")


def _read_rows(metrics: Path) -> list[Row]:
    """One row per step, with the scores after it; an incomplete line at the end is left out.

    Raises:
        RunError: a line is damaged.
    """
    rows: list[Row] = []
    lines = metrics.read_bytes().split(b"\n") if metrics.exists() else []
    for number, line in enumerate(lines[:-1], start=1):
        place = f"{metrics}, line {number}"
        try:
            row = parse_line(line)
        except ValueError:
            raise RunError(f"{place} is damaged; restore the file, or train again") from None
        if row.keys() != SCORES.keys():
            require_step(place, row, rows[-1] if rows else None)
            rows.append(row)
            continue
        require_kinds(place, row, SCORES)
        last: Row = rows[-1] if rows else {"step": 0}
        if row["step"] != last["step"] or row["metrics"] is None:
            raise RunError(
                f"{place} has scores of step {row['step']} after step {last['step']}; restore the "
                "file from a copy"
            )
        last["metrics"] = {**(last["metrics"] or {}), **row["metrics"]}
    return rows


def group_seeds(histories: list[History]) -> dict[str, list[History]]:
    """Groups of runs that differ only in their seed, by a name for each, in the given order.

    A run that is listed twice counts once. The names of groups with one label have their folder.
    """
    runs_of: dict[tuple[str, str], list[History]] = {}
    for history in {history.path: history for history in histories}.values():
        runs_of.setdefault((history.label, history.settings_without_seed), []).append(history)
    labels = [label for label, _ in runs_of]
    groups: dict[str, list[History]] = {}
    for (label, _), runs in runs_of.items():
        name = label if labels.count(label) == 1 else f"{runs[0].path.parent.name}/{label}"
        while name in groups:
            name += "'"
        groups[name] = runs
    return groups


def seeds_of(histories: list[History]) -> str:
    """The number of runs that a row of the table summarizes, in words."""
    groups = group_seeds(histories).values()
    runs = range_text([len(group) for group in groups])
    if runs == "1":
        return "one run a row"
    seeds = range_text([len({run.settings.get("seed") for run in group}) for group in groups])
    plural = "s" * (seeds != "1")
    return f"{SUMMARY} over {f'{runs} runs of ' * (runs != seeds)}{seeds} seed{plural}"


def range_text(counts: list[int]) -> str:
    """One number, or the least and the largest: 2 to 3."""
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 of one value."""
    return stdev(values) if len(values) > 1 else 0.0


def mean_text(values: Sequence[float], digits: int) -> str:
    """The mean, and the deviation if it is not rounded to 0, with this number of digits."""
    mean, spread = f"{fmean(values):,.{digits}f}", deviation(values)
    return f"{mean} ± {spread:,.{digits}f}" if round(spread, digits) else mean


def score_unit(name: str, values: Iterable[float]) -> tuple[str, str, float]:
    """How people write a score: its name, its unit and the factor of its values in this unit.

    An accuracy is in percent. Another score keeps its name.

    Example:
        >>> score_unit("test_accuracy", [0.91, 0.982])
        ('test accuracy', ' %', 100.0)
        >>> score_unit("test accuracy, %", [98.2]), score_unit("BLEU", [0.3])
        (('test accuracy', ' %', 1.0), ('BLEU', '', 1.0))
    """
    if ", %" in name:
        return name.replace(", %", "", 1), " %", 1.0
    if _ACCURACY.search(name) and all(0 <= value <= 1 for value in values):
        return re.sub("[_/]", " ", name), " %", 100.0
    return name, "", 1.0


def main_score(histories: Sequence[History]) -> str | None:
    """The first score of the runs; None where one of them has none yet."""
    scores = [history.score for history in histories]
    return scores[0] if scores and None not in scores else None


def counted_of(histories: Iterable[History]) -> str:
    """What batch sizes count in these runs: samples, or tokens."""
    units = {str(history.settings.get("unit", "samples")) for history in histories}
    return " or ".join(sorted(units)) or "samples"


def unit_of(histories: Iterable[History], score: str) -> tuple[str, str, float]:
    """Name, unit and factor of a score, by its values in all these runs."""
    rows = (row["metrics"] for history in histories for row in history.scored_rows)
    return score_unit(score, [one[score] for one in rows if one.get(score) is not None])


def scores_text(scores: Sequence[float | None]) -> str:
    """The text of one score over runs: two digits from 10 on, else four.

    It has the number of runs with a score where others diverged or have none yet.
    """
    measured = [score for score in scores if score is not None]
    if not measured:
        return "not measured"
    text = mean_text(measured, 2 if abs(fmean(measured)) >= 10 else 4)
    return text + f" ({len(measured)} of {len(scores)})" * (len(measured) < len(scores))


def steps_text(steps: Sequence[int], skipped: Sequence[int]) -> str:
    """The text of numbers of updates and of skipped steps."""
    return mean_text(steps, 0) + f" ({fmean(skipped):,.0f} skipped)" * any(skipped)


def unfinished_text(runs: Sequence[History]) -> str:
    """How many of the runs are not finished, in words; "" where all are."""
    unfinished = sum(not run.finished for run in runs)
    return f" ({unfinished} of {len(runs)} unfinished)" * bool(unfinished)


def missing_text(runs: Sequence[History]) -> str:
    """Of how many steps the logs have rows, in words; "" where of all."""
    logged = sum(len(run.rows) for run in runs)
    steps: int = sum(run.rows[-1]["step"] for run in runs if run.rows)
    return f" (rows of {logged:,} of {steps:,} steps)" * (logged < steps)


class Table(NamedTuple):
    """Rows of text under columns."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def table_of(histories: list[History]) -> Table:
    """One row per group of seeds: last scores, steps, average batch, samples and wall time.

    Where no run has a score, the last training loss takes their place.
    """
    all_scores = (row["metrics"] for run in histories for row in run.scored_rows)
    scores = tuple(dict.fromkeys(name for one in all_scores for name in one))
    rows = [_row(name, runs, scores) for name, runs in group_seeds(histories).items()]
    steps, batch, _, time = _COLUMNS
    columns = steps, batch, counted_of(histories), time
    return Table(("run", *(scores or ("training loss",)), *columns), rows)


def _row(name: str, runs: list[History], scores: Sequence[str]) -> tuple[str, ...]:
    started = [run for run in runs if run.rows]
    if not started:
        return (name, *["nothing yet"] * (max(1, len(scores)) + len(_COLUMNS)))
    name += unfinished_text(runs)
    runs = started
    diverged = sum(bool(run.divergence) for run in runs)
    name += f" ({f'{diverged} of {len(runs)} ' * (len(runs) > 1)}diverged)" * bool(diverged)
    last = [run.rows[-1] for run in runs]
    return (
        name + missing_text(runs),
        *(
            [scores_text([run.last(score) for run in runs]) for score in scores]
            or [scores_text([run.final_loss for run in runs])]
        ),
        steps_text([run.steps for run in runs], [run.skipped for run in runs]),
        mean_text([run.average_batch for run in runs], 0),
        f"{fmean(row['samples'] for row in last):,.0f}",
        f"{mean_text([row['elapsed_seconds'] for row in last], 1)} s",
    )
