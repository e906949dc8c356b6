"""What a step becomes in the log, and a log becomes in a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.errors import RunError, SettingError
from bigbatch.policies.parse import target_of
from bigbatch.runs.divergence import divergence_of
from bigbatch.runs.row_schema import SCHEMA, require_step
from bigbatch.runs.run_config import PREREQUISITES
from bigbatch.runs.run_directory import Row, RunDirectory
from bigbatch.runs.seed_summary import SeedSummary
from bigbatch.training.step_record import StepRecord

Scores = Mapping[str, float]

_COLUMNS = ("steps", "average batch", "samples", "wall time")


def row_of(record: StepRecord, scores: Scores | None) -> Row:
    """One line of the metrics: everything a policy could be replayed from.

    Args:
        record: the step.
        scores: by name, in the unit the name says, where they were measured after the step.
    """
    noise = record.statistics
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
        "grad_sqnorm": noise and noise.grad_sqnorm,
        "grad_variance": noise and noise.grad_variance,
        "similarity": record.similarity,
        "noise_scale": record.noise_scale,
        "skipped": record.skipped,
        "next_batch_size": record.decision.batch_size,
        "next_lr_factor": record.decision.lr_factor,
        "decision_reason": record.decision.reason,
        "metrics": scores and {name: finite(score) for name, score in scores.items()},
        "elapsed_seconds": record.elapsed_seconds,
    }
    if record.gsnr is not None:
        row["gsnr"] = {
            name: [_rounded(number) for number in numbers]
            for name, numbers in record.gsnr.by_layer().items()
        }
    return {name: finite(value) for name, value in row.items()}


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(number: float) -> float | None:
    """To four digits: a layer has four numbers in every line."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


@dataclass(frozen=True)
class History:
    """One run as it was logged."""

    path: Path
    settings: dict[str, Any]
    target: float | None  # similarity that was to be held
    rows: list[Row]

    @property
    def label(self) -> str:
        """Its arm of a study, or its own name."""
        return str(self.settings.get("arm") or self.path.name)

    @property
    def kind(self) -> str:
        """The same for runs that differ in their seed only."""
        settings = {name: value for name, value in self.settings.items() if name != "seed"}
        own = f"-seed{self.settings.get('seed')}"
        before = {name: str(settings.get(name, "")).removesuffix(own) for name in PREREQUISITES}
        return repr({**settings, **before})

    @property
    def measured(self) -> bool:
        """Whether any step was."""
        return any(
            row["grad_sqnorm"] is not None and row["grad_variance"] is not None for row in self.rows
        )

    @property
    def finished(self) -> bool:
        """Whether its last epoch is complete."""
        last = self.rows[-1] if self.rows else None
        epochs = self.settings.get("epochs")
        return last is not None and last["epoch"] + 1 == epochs and last["metrics"] is not None

    @property
    def steps(self) -> int:
        """Updates of the weights."""
        return self.rows[-1]["step"] - self.skipped if self.rows else 0

    @property
    def skipped(self) -> int:
        """Steps that were none, as their gradient was not finite."""
        return sum(row["skipped"] for row in self.rows)

    @property
    def average_batch(self) -> float:
        """Samples of an update on average; nan before the first."""
        if not self.steps:
            return math.nan
        lost = sum(row["batch_size"] for row in self.rows if row["skipped"])
        return float((self.rows[-1]["samples"] - lost) / self.steps)

    @property
    def divergence(self) -> str:
        """How it diverged, in words; "" where it did not."""
        return divergence_of(self.rows)

    @property
    def scored_rows(self) -> list[Row]:
        """The steps after which scores were measured."""
        return [row for row in self.rows if row["metrics"] is not None]

    @property
    def score(self) -> str | None:
        """The name of the one that counts, where one is measured yet: the first."""
        return next((name for row in self.scored_rows for name in row["metrics"]), None)

    def last(self, score: str) -> float | None:
        """The score when it was measured last; None where it never was, or was no finite number."""
        rows = self.scored_rows
        return rows[-1]["metrics"].get(score) if rows else None


def history_of(run: RunDirectory) -> History:
    """Reads a run's log.

    Raises:
        RunError: a line is damaged or of another schema, or the policy is none.
    """
    settings, rows = run.settings, run.rows()
    for number, (before, row) in enumerate(zip([None, *rows], rows, strict=False), start=1):
        require_step(f"{run.metrics}, line {number}", row, before)
    policy = settings.get("policy")
    try:
        target = target_of(policy, settings.get("target")) if policy else None
    except SettingError as error:
        raise RunError(f"{run.path / 'config.yaml'}: {error}") from None
    return History(run.path.resolve(), settings, target, rows)


def group_seeds(histories: list[History]) -> dict[str, list[History]]:
    """Runs that differ in their seed only, under a name for each group, in the order they come.

    A run given twice counts once. Groups of one label are distinguished by their folder.
    """
    kinds: dict[tuple[str, str], list[History]] = {}
    for history in {history.path: history for history in histories}.values():
        kinds.setdefault((history.label, history.kind), []).append(history)
    labels = [label for label, _ in kinds]
    groups: dict[str, list[History]] = {}
    for (label, _), runs in kinds.items():
        name = label if labels.count(label) == 1 else f"{runs[0].path.parent.name}/{label}"
        while name in groups:
            name += "'"
        groups[name] = runs
    return groups


def seeds_of(histories: list[History]) -> str:
    """How many runs a row of the table stands for, in words."""
    groups = group_seeds(histories).values()
    runs = _ends([len(group) for group in groups])
    if runs == "1":
        return "one run a row"
    seeds = _ends([len({run.settings.get("seed") for run in group}) for group in groups])
    of_seeds = f"{seeds} seed{'s' * (seeds != '1')}"
    words = _summary_of(histories).words
    return f"{words} over {f'{runs} runs of ' * (runs != seeds)}{of_seeds}"


def _summary_of(histories: list[History]) -> SeedSummary:
    return SeedSummary.of(history.settings for history in histories)


def _ends(counts: list[int]) -> str:
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


@dataclass(frozen=True)
class Table:
    """Rows of text under columns."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def table_of(histories: list[History]) -> Table:
    """One row per group: its last scores and what they took, summed up over seeds."""
    scores = tuple(
        dict.fromkeys(
            name for run in histories for row in run.scored_rows[-1:] for name in row["metrics"]
        )
    )
    summary = _summary_of(histories)
    rows = [_row(name, runs, scores, summary) for name, runs in group_seeds(histories).items()]
    return Table(("run", *(scores or ("score",)), *_COLUMNS), rows)


def _row(
    name: str, runs: list[History], scores: Sequence[str], summary: SeedSummary
) -> tuple[str, ...]:
    unfinished = sum(not run.finished for run in runs)
    begun = [run for run in runs if run.rows]
    if not begun:
        return (name, *["nothing yet"] * (max(1, len(scores)) + len(_COLUMNS)))
    name = f"{name} ({unfinished} of {len(runs)} unfinished)" if unfinished else name
    runs = begun
    diverged = sum(bool(run.divergence) for run in runs)
    name += f" ({f'{diverged} of {len(runs)} ' * (len(runs) > 1)}diverged)" * bool(diverged)
    last = [run.rows[-1] for run in runs]
    return (
        name,
        *(summary.of_scores([run.last(score) for run in runs]) for score in scores or ("",)),
        summary.of_steps([run.steps for run in runs], [run.skipped for run in runs]),
        summary.text([run.average_batch for run in runs], 0),
        f"{fmean(row['samples'] for row in last):,.0f}",
        f"{summary.text([row['elapsed_seconds'] for row in last], 1)} s",
    )
