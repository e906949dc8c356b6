"""Rows of the log, the history of a run, and tables of histories."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.errors import RunError, SettingError
from bigbatch.log.divergence import divergence_of
from bigbatch.log.row_schema import SCHEMA, require_step
from bigbatch.log.run_config import PREREQUISITES
from bigbatch.log.run_directory import Row, RunDirectory
from bigbatch.log.seed_summary import SeedSummary
from bigbatch.log.step_record import StepRecord
from bigbatch.policies.parse import target_of

Scores = Mapping[str, float]

_COLUMNS = ("steps", "average batch", "samples", "wall time")


def row_of(record: StepRecord, scores: Scores | None) -> Row:
    """The row of one step in the log, from which a policy can be replayed.

    Args:
        record: the step.
        scores: scores after the step, by name; None where none were measured.
    """
    statistics = record.statistics
    row: Row = {
        "schema": SCHEMA,
        "step": record.step,
        "epoch": record.epoch,
        "samples": record.samples,
        "batch_size": record.batch_size,
        "target_batch_size": record.target_batch_size,
        "micro_batches": record.micro_batches,
        "loss": record.loss,
        "lr": list(record.lr),
        "grad_sqnorm": statistics and statistics.grad_sqnorm,
        "grad_variance": statistics and statistics.grad_variance,
        "similarity": record.similarity,
        "noise_scale": record.noise_scale,
        "skipped": record.skipped,
        "next_batch_size": record.decision.batch_size,
        "next_lr_factor": record.decision.lr_factor,
        "decision_reason": record.decision.reason,
        "metrics": scores and {name: finite(score) for name, score in scores.items()},
        "every": record.every,
        "elapsed_seconds": record.elapsed_seconds,
    }
    if record.gsnr is not None:
        row["gsnr"] = _rounded(record.gsnr.by_layer())
    if statistics is not None and statistics.half_batch_cosine is not None:
        row["half_batch_cosine"] = statistics.half_batch_cosine
    if statistics is not None and statistics.interval is not None:
        row["similarity_interval"] = _ends(statistics.similarity_interval)
        row["noise_scale_interval"] = _ends(statistics.noise_scale_interval)
    if statistics is not None and statistics.layers:
        row["layers"] = _rounded(
            {name: (one.noise_scale, one.similarity) for name, one in statistics.layers.items()}
        )
    return {name: finite(value) for name, value in row.items()}


def finite(value: Any) -> Any:
    """The value; None for nan and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(by_layer: Mapping[str, Iterable[float]]) -> dict[str, list[float | None]]:
    """The numbers of each layer with four digits."""
    return {name: [_round(number) for number in numbers] for name, numbers in by_layer.items()}


def _ends(interval: tuple[float, float] | None) -> list[float | None]:
    return [_round(end) for end in interval or ()]


def _round(number: float) -> float | None:
    """The number with four digits, which keeps rows short; None where it is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def measured_rows(rows: list[Row]) -> list[Row]:
    """The steps whose gradients were measured, with a finite result."""
    return [
        row for row in rows if row["grad_sqnorm"] is not None and row["grad_variance"] is not None
    ]


@dataclass(frozen=True)
class History:
    """The log and the settings of one run.

    Args:
        path: directory of the run.
        settings: settings of the run.
        target: similarity that its policy holds; None for another policy.
        rows: rows of its log.
    """

    path: Path
    settings: dict[str, Any]
    target: float | None
    rows: list[Row]

    @property
    def label(self) -> str:
        """The arm of the study, or the name of the directory."""
        return str(self.settings.get("arm") or self.path.name)

    @property
    def settings_without_seed(self) -> str:
        """The settings as text, equal for runs that differ only in their seed."""
        settings = {name: value for name, value in self.settings.items() if name != "seed"}
        suffix = f"-seed{self.settings.get('seed')}"
        runs = {name: str(settings.get(name, "")).removesuffix(suffix) for name in PREREQUISITES}
        return repr({**settings, **runs})

    @property
    def finished(self) -> bool:
        """Whether the last epoch is complete."""
        last = self.rows[-1] if self.rows else None
        epochs = self.settings.get("epochs")
        return last is not None and last["epoch"] + 1 == epochs and last["metrics"] is not None

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
    def divergence(self) -> str:
        """How the run diverged, in words; "" where it did not."""
        return divergence_of(self.rows)

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
        rows = self.scored_rows
        return rows[-1]["metrics"].get(score) if rows else None


def history_of(run: RunDirectory) -> History:
    """Reads a run's log.

    Raises:
        RunError: a line is damaged or of another schema, or the policy is unknown.
    """
    settings, rows = run.settings, run.rows()
    for number, (previous, row) in enumerate(zip([None, *rows], rows, strict=False), start=1):
        require_step(f"{run.metrics}, line {number}", row, previous)
    policy = settings.get("policy")
    try:
        target = target_of(policy, settings.get("target")) if policy else None
    except SettingError as error:
        raise RunError(f"{run.path / 'config.yaml'}: {error}") from None
    return History(run.path.resolve(), settings, target, rows)


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
    runs = _range_text([len(group) for group in groups])
    if runs == "1":
        return "one run a row"
    seeds = _range_text([len({run.settings.get("seed") for run in group}) for group in groups])
    words = SeedSummary.of(history.settings for history in histories).words
    plural = "s" * (seeds != "1")
    return f"{words} over {f'{runs} runs of ' * (runs != seeds)}{seeds} seed{plural}"


def _range_text(counts: list[int]) -> str:
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


@dataclass(frozen=True)
class Table:
    """Rows of text under columns."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def table_of(histories: list[History]) -> Table:
    """One row per group of seeds: last scores, steps, average batch, samples and wall time."""
    scores = tuple(
        dict.fromkeys(
            name for run in histories for row in run.scored_rows[-1:] for name in row["metrics"]
        )
    )
    summary = SeedSummary.of(history.settings for history in histories)
    rows = [_row(name, runs, scores, summary) for name, runs in group_seeds(histories).items()]
    return Table(("run", *(scores or ("score",)), *_COLUMNS), rows)


def _row(
    name: str, runs: list[History], scores: Sequence[str], summary: SeedSummary
) -> tuple[str, ...]:
    unfinished = sum(not run.finished for run in runs)
    started = [run for run in runs if run.rows]
    if not started:
        return (name, *["nothing yet"] * (max(1, len(scores)) + len(_COLUMNS)))
    name += f" ({unfinished} of {len(runs)} unfinished)" * bool(unfinished)
    runs = started
    diverged = sum(bool(run.divergence) for run in runs)
    name += f" ({f'{diverged} of {len(runs)} ' * (len(runs) > 1)}diverged)" * bool(diverged)
    last = [run.rows[-1] for run in runs]
    return (
        name,
        *(summary.scores_text([run.last(score) for run in runs]) for score in scores or ("",)),
        summary.steps_text([run.steps for run in runs], [run.skipped for run in runs]),
        summary.text([run.average_batch for run in runs], 0),
        f"{fmean(row['samples'] for row in last):,.0f}",
        f"{summary.text([row['elapsed_seconds'] for row in last], 1)} s",
    )
