"""Types and ranges of the values in logs, configs and studies."""

from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from bigbatch.errors import RunError
from bigbatch.setting_types import In, Kind, NotNegative, Number

SCHEMA = 3


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

STEP = {  # values of every line of metrics.jsonl that are read
    "schema": Kind(Annotated[int, In(f"[{SCHEMA}, {SCHEMA}]")]),
    "step": Kind(_Count),
    "epoch": Kind(_Whole),
    "samples": Kind(_Count),
    "batch_size": Kind(_Count),
    "micro_batches": Kind(_Count),
    "loss": Kind(_OptionalNumber),
    "lr": Kind(Annotated[list[Number], _NotEmpty()]),
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
    "gsnr": Kind(dict[str, _LayerNumbers]),
    "half_batch_cosine": Kind(_OptionalNumber),
    "similarity_interval": Kind(tuple[_OptionalNumber, _OptionalNumber]),
    "noise_scale_interval": Kind(tuple[_OptionalNumber, _OptionalNumber]),
    "layers": Kind(dict[str, tuple[_OptionalNumber, _OptionalNumber]]),  # noise scale, similarity
}
SETTINGS = {  # settings of config.yaml that are read with a log
    "arm": Kind(str),
    "seed": Kind(_Whole),
    "epochs": Kind(_Count),
    "policy": Kind(str),
    "target": Kind(Number),
    "init_from": Kind(str),
    "lr_control_from": Kind(str),
    "over_seeds": Kind(Literal["mean", "median"]),
    "task": Kind(dict[str, Number | str | bool]),
}
SWEEP = {
    "tuned": Kind(list[str]),
    "tuning_seeds": Kind(list[_Whole]),
    "higher_is_better": Kind(bool),
    "points": Kind(Annotated[dict[str, dict[str, _Scalar]], _NotEmpty()]),
}
_OTHER_SETTING = Kind(_Scalar)


def require_kinds(place: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises RunError for the first value that is not of its kind; values may be missing.

    Args:
        place: the file and the line of the values.
        values: the values by name.
        kinds: kinds of some or all of the values, by name.
    """
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


def require_step(place: str, row: Any, previous: Mapping[str, Any] | None) -> None:
    """Raises RunError where a line of the log is no step, or does not follow the previous one."""
    if not isinstance(row, dict):
        raise RunError(f"{place} is {shortened(row)}, and must be a step; restore the file")
    schema = row.get("schema")
    if schema not in STEP["schema"]:
        raise RunError(f"{place} is no step of schema {SCHEMA}, but of {shortened(schema)}")
    require_names(place, row, STEP)
    require_kinds(place, row, STEP | OPTIONAL_STEP)
    if row["micro_batches"] > row["batch_size"]:
        raise RunError(
            f"{place}: micro_batches is {row['micro_batches']}, and must be at most the batch_size "
            f"{row['batch_size']}; restore the file from a copy"
        )
    last = previous or {"step": 0, "epoch": 0, "samples": 0}
    steps, samples = row["step"] - last["step"], row["samples"] - last["samples"]
    if steps < 1 or row["epoch"] < last["epoch"]:
        raise RunError(
            f"{place}: step {row['step']} of epoch {row['epoch']} follows step {last['step']} of "
            f"epoch {last['epoch']}; restore the file from a copy"
        )
    if samples < row["batch_size"] or (steps == 1 and samples != row["batch_size"]):
        raise RunError(
            f"{place}: samples is {row['samples']}, and must be {last['samples']} before the step "
            f"and its batch_size {row['batch_size']}; restore the file from a copy"
        )


def require_settings(place: Path | str, settings: Any) -> None:
    """Raises RunError where the settings of a training have other types than a log needs."""
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise RunError(
            f"{place}: settings is {shortened(settings)}, and must be names with a value each; "
            "restore the file from a copy"
        )
    require_kinds(str(place), settings, {**dict.fromkeys(settings, _OTHER_SETTING), **SETTINGS})
