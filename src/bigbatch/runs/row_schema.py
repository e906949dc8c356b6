"""Which type and range each value of a log, a config or a study has."""

from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from bigbatch.errors import RunError
from bigbatch.setting_types import In, Kind, NotNegative, Number

SCHEMA = 3


class _Some:
    """A list or a mapping with anything in it."""

    def __contains__(self, value: Sized) -> bool:
        return len(value) > 0

    def __str__(self) -> str:
        return "(one or more)"


_Count = Annotated[int, In("[1, 9e18]")]  # of an int64
_Whole = Annotated[int, In("[0, 9e18]")]
_Maybe = Number | None
_Plain = Number | str | bool
_Seconds = Annotated[float, In("[0, 1e12]")]

STEP = {  # a line of metrics.jsonl, for what is read of it
    "schema": Kind(Annotated[int, In(f"[{SCHEMA}, {SCHEMA}]")]),
    "step": Kind(_Count),
    "epoch": Kind(_Whole),
    "samples": Kind(_Count),
    "batch_size": Kind(_Count),
    "micro_batches": Kind(_Count),
    "loss": Kind(_Maybe),
    "lr": Kind(Annotated[list[Number], _Some()]),
    "grad_sqnorm": Kind(_Maybe),
    "grad_variance": Kind(NotNegative | None),
    "skipped": Kind(bool),
    "metrics": Kind(Annotated[dict[str, _Maybe], _Some()] | None),
    "elapsed_seconds": Kind(_Seconds),
}
STEP_TOO = {  # not in every line
    "target_batch_size": Kind(_Count),
    "similarity": Kind(_Maybe),
    "noise_scale": Kind(_Maybe),
    "next_batch_size": Kind(_Count),
    "next_lr_factor": Kind(_Maybe),
    "decision_reason": Kind(str),
    "gsnr": Kind(dict[str, tuple[_Maybe, _Maybe, _Maybe, _Maybe]]),
}
SETTINGS = {  # of config.yaml, for what a log is shown with
    "arm": Kind(str),
    "seed": Kind(_Whole),
    "epochs": Kind(_Count),
    "policy": Kind(str),
    "target": Kind(Number),
    "init_from": Kind(str),
    "lr_control_from": Kind(str),
    "over_seeds": Kind(Literal["mean", "median"]),
    "task": Kind(dict[str, _Plain]),
}
SWEEP = {
    "tuned": Kind(list[str]),
    "higher_is_better": Kind(bool),
    "points": Kind(Annotated[dict[str, dict[str, _Plain]], _Some()]),
}
_IN_A_STEP = STEP | STEP_TOO
_PLAIN = Kind(_Plain | None)


def require_kinds(place: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises RunError for the first of these values that is of another kind; absent ones are none.

    Args:
        place: the file, and the line, of the values.
        values: by name.
        kinds: of some or all of them, by name.
    """
    for name, value in values.items():
        if name in kinds and value not in kinds[name]:
            raise RunError(
                f"{place}: {name} is {shortened(value)}, and must be {kinds[name]}; "
                "restore the file from a copy"
            )


def require_names(place: str, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises RunError where one of these values is not there."""
    if missing := [name for name in names if name not in values]:
        raise RunError(f"{place}: {missing[0]} is missing; restore the file from a copy")


def require_step(place: str, row: Any, before: Mapping[str, Any] | None) -> None:
    """Raises RunError where a line of the log is no step, or not one after the step before."""
    if not isinstance(row, dict):
        raise RunError(f"{place} is {shortened(row)}, and must be a step; restore the file")
    schema = row.get("schema")
    if schema not in STEP["schema"]:
        raise RunError(f"{place} is no step of schema {SCHEMA}, but of {shortened(schema)}")
    require_names(place, row, STEP)
    require_kinds(place, row, _IN_A_STEP)
    if row["micro_batches"] > row["batch_size"]:
        raise RunError(
            f"{place}: micro_batches is {row['micro_batches']}, and must be at most the batch_size "
            f"{row['batch_size']}; restore the file from a copy"
        )
    last = before or {"step": 0, "epoch": 0, "samples": 0}
    after, seen = row["step"] - last["step"], row["samples"] - last["samples"]
    if after < 1 or row["epoch"] < last["epoch"]:
        raise RunError(
            f"{place}: step {row['step']} of epoch {row['epoch']} follows step {last['step']} of "
            f"epoch {last['epoch']}; restore the file from a copy"
        )
    if seen < row["batch_size"] or (after == 1 and seen != row["batch_size"]):
        raise RunError(
            f"{place}: samples is {row['samples']}, and must be {last['samples']} before the step "
            f"and its batch_size {row['batch_size']}; restore the file from a copy"
        )


def require_settings(place: Path | str, settings: Any) -> None:
    """Raises RunError where the settings of a training are none, as far as a log needs them."""
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise RunError(
            f"{place}: settings is {shortened(settings)}, and must be names with a value each; "
            "restore the file from a copy"
        )
    require_kinds(str(place), settings, {**dict.fromkeys(settings, _PLAIN), **SETTINGS})
