"""The rows of a log: how a step becomes one, and the types and ranges that a reader requires.

docs/logs.md has every key.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sized
from reprlib import repr as shortened
from typing import Annotated, Any

from bigbatch.errors import RunError
from bigbatch.log.step_record import StepRecord
from bigbatch.setting_types import In, Kind, NotNegative, Number
from bigbatch.statistics.noise_scale import Compared, GradientStatistics

SCHEMA = 3
METRICS, SETTINGS = "metrics.jsonl", "settings.json"  # the files of a log

Row = dict[str, Any]


class _NotEmpty:
    """Lists and mappings that are not empty."""

    def __contains__(self, value: Sized) -> bool:
        return len(value) > 0

    def __str__(self) -> str:
        return "(one or more)"


_Count = Annotated[int, In("[1, 9e18]")]  # fits an int64
_Whole = Annotated[int, In("[0, 9e18]")]
_OptionalNumber = Number | None
_LayerNumbers = tuple[_OptionalNumber, _OptionalNumber, _OptionalNumber, _OptionalNumber]
_Scalar = Number | str | bool | None
_Seconds = Annotated[float, In("[0, 1e12]")]

_RECORDED = ("step", "epoch", "samples", "batch_size", "target_batch_size", "micro_batches", "loss")
_MEASURED = ("grad_sqnorm", "grad_variance", "similarity", "noise_scale")

STEP = {  # values of every line of metrics.jsonl that are read
    "schema": Kind(Annotated[int, In(f"[{SCHEMA}, {SCHEMA}]")]),
    "step": Kind(_Count),
    "epoch": Kind(_Whole),
    "samples": Kind(_Count),
    "batch_size": Kind(_Count),
    "micro_batches": Kind(_Count),
    "loss": Kind(_OptionalNumber),
    "lr": Kind(Annotated[list[_OptionalNumber], _NotEmpty()]),
    "grad_sqnorm": Kind(_OptionalNumber),
    "grad_variance": Kind(NotNegative | None),
    "skipped": Kind(bool),
    "metrics": Kind(Annotated[dict[str, _OptionalNumber], _NotEmpty()] | None),
    "elapsed_seconds": Kind(_Seconds),
}
OPTIONAL_STEP = {  # values that a line may lack
    "target_batch_size": Kind(_Count),
    "similarity": Kind(_OptionalNumber),
    "noise_scale": Kind(_OptionalNumber),
    "next_batch_size": Kind(_Count),
    "next_lr_factor": Kind(_OptionalNumber),
    "decision_reason": Kind(str),
    "every": Kind(_Count | None),
    "compared": Kind(Compared),
    "gsnr": Kind(dict[str, _LayerNumbers]),
    "half_batch_cosine": Kind(_OptionalNumber),
    "similarity_interval": Kind(tuple[_OptionalNumber, _OptionalNumber]),
    "noise_scale_interval": Kind(tuple[_OptionalNumber, _OptionalNumber]),
    "layers": Kind(dict[str, tuple[_OptionalNumber, _OptionalNumber]]),  # noise scale, similarity
}
SCORES = {"step": STEP["step"], "metrics": STEP["metrics"]}  # a line of scores after a step
_SETTINGS = {  # settings that are read with a log
    "arm": Kind(str),
    "seed": Kind(_Whole),
    "epochs": Kind(_Count),
    "policy": Kind(str),
    "target": Kind(Number),
    "higher_is_better": Kind(bool),
}
_OTHER_SETTING = Kind(_Scalar | dict[str, Number | str | bool])


def setting_kinds(settings: Mapping[str, Any]) -> dict[str, Kind]:
    """The kind of each setting, by name."""
    return {name: _SETTINGS.get(name, _OTHER_SETTING) for name in settings}


def row_of(record: StepRecord) -> Row:
    """The row of a step of `AdaptiveBatch`, from which a policy can be replayed."""
    row: Row = {
        "schema": SCHEMA,
        **{name: getattr(record, name) for name in _RECORDED},
        "lr": list(record.lr),
        **statistics_of(record.statistics),
        "skipped": record.skipped,
        "next_batch_size": record.decision.batch_size,
        "next_lr_factor": record.decision.lr_factor,
        "decision_reason": record.decision.reason,
        "metrics": None,
        "every": record.every,
        "elapsed_seconds": record.elapsed_seconds,
    }
    if record.gsnr is not None:
        row["gsnr"] = _rounded(record.gsnr.by_layer())
    return row


def statistics_of(statistics: GradientStatistics | None) -> Row:
    """The part of a row that was measured; null where nothing was."""
    row: Row = {name: getattr(statistics, name, None) for name in _MEASURED}
    if statistics is None:
        return row
    row["compared"] = statistics.compared
    if statistics.half_batch_cosine is not None:
        row["half_batch_cosine"] = statistics.half_batch_cosine
    if statistics.interval is not None:
        row["similarity_interval"] = [*map(_round, statistics.similarity_interval or ())]
        row["noise_scale_interval"] = [*map(_round, statistics.noise_scale_interval or ())]
    if statistics.layers:
        row["layers"] = _rounded(
            {name: (one.noise_scale, one.similarity) for name, one in statistics.layers.items()}
        )
    return row


def line_of(row: Row) -> bytes:
    """The row as a line of the log."""
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """The value, or all of a container; None for nan and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(by_layer: Mapping[str, Iterable[float]]) -> dict[str, list[float | None]]:
    """The numbers of each layer with four digits."""
    return {name: [*map(_round, numbers)] for name, numbers in by_layer.items()}


def _round(number: float) -> float | None:
    """The number with four digits, which keeps rows short; None where it is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def parse_line(line: bytes) -> Row:
    """The row of a line of the log.

    Raises:
        ValueError: the line is no JSON object, or has nan or infinity, which JSON lacks.
    """
    try:
        row = json.loads(line.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


def require_kinds(place: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises RunError for the first value that is not of its kind; values may be missing."""
    for name, value in values.items():
        if name in kinds and value not in kinds[name]:
            raise RunError(
                f"{place}: {name} is {shortened(value)}, and must be {kinds[name]}; "
                "restore the file from a copy"
            )


def require_names(place: str, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises RunError where a value is missing."""
    if missing := [name for name in names if name not in values]:
        raise RunError(f"{place}: {missing[0]} is missing; restore the file from a copy")


def require_step(place: str, row: Row, previous: Mapping[str, Any] | None) -> None:
    """Raises RunError where a line of the log is no step, or does not follow the previous one."""
    schema = row.get("schema")
    if schema not in STEP["schema"]:
        raise RunError(f"{place} is no step of schema {SCHEMA}, but of {shortened(schema)}")
    require_names(place, row, STEP)
    require_kinds(place, row, STEP | OPTIONAL_STEP)
    last = previous or {"step": 0, "epoch": 0, "samples": 0}
    steps, samples = row["step"] - last["step"], row["samples"] - last["samples"]
    size = row["batch_size"]
    wrong = ""
    if row["micro_batches"] > size:
        wrong = (
            f"micro_batches is {row['micro_batches']}, and must be at most the batch_size {size}"
        )
    elif steps < 1 or row["epoch"] < last["epoch"]:
        wrong = (
            f"step {row['step']} of epoch {row['epoch']} follows step {last['step']} of epoch "
            f"{last['epoch']}"
        )
    elif samples < size or (steps == 1 and samples != size):
        wrong = (
            f"samples is {row['samples']}, and must be {last['samples']} before the step and its "
            f"batch_size {size}"
        )
    if wrong:
        raise RunError(f"{place}: {wrong}; restore the file from a copy")


def require_settings(place: str, settings: Any) -> None:
    """Raises RunError where settings of a training have other types than a log needs."""
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise RunError(
            f"{place}: settings is {shortened(settings)}, and must be names with a value each; "
            "restore the file from a copy"
        )
    require_kinds(place, settings, setting_kinds(settings))
