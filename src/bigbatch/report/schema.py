"""Which type and range each value of a log, a config or a study has."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from bigbatch.errors import RunError

SCHEMA = 2

_LIMIT = 2**63  # of whole numbers: those of int64


@dataclass(frozen=True)
class Kind:
    """What a value may be.

    Args:
        words: that say it in an error.
        fits: whether a value is one.
    """

    words: str
    fits: Callable[[Any], bool]

    def or_null(self) -> "Kind":
        """The same, or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _LIMIT
    return type(value) is float and math.isfinite(value)


def whole(least: int) -> Kind:
    """A whole number from `least` on."""
    words = f"a whole number of {least} or more"
    return Kind(words, lambda value: type(value) is int and least <= value < _LIMIT)


def mapping(values: Kind, words: str) -> Kind:
    """Names with values of one kind each."""

    def fits(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(name, str) and values.fits(one) for name, one in value.items()
        )

    return Kind(words, fits)


NUMBER = Kind("a finite number", _is_number)
TEXT = Kind("text", lambda value: isinstance(value, str))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
PLAIN = Kind(
    "a finite number, text, true or false",
    lambda value: any(kind.fits(value) for kind in (NUMBER, TEXT, TRUTH)),
)
TEXTS = Kind(
    "a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.fits, value))
)
_NOT_NEGATIVE = Kind("a finite number, not negative", lambda v: _is_number(v) and v >= 0)
_SECONDS = Kind("seconds, 0 to 1e12", lambda value: _is_number(value) and 0 <= value <= 1e12)
_RATES = Kind(
    "a list of one finite number or more",
    lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_number, value)),
)
_FOUR = Kind(
    "a list of four numbers or nulls",
    lambda value: (
        isinstance(value, list) and len(value) == 4 and all(map(NUMBER.or_null().fits, value))
    ),
)
_SCORES = mapping(NUMBER.or_null(), "names with a finite number or null each, one or more")

STEP = {  # a line of metrics.jsonl, for what is read of it
    "schema": Kind(str(SCHEMA), lambda value: type(value) is int and value == SCHEMA),
    "step": whole(1),
    "epoch": whole(0),
    "samples": whole(1),
    "batch_size": whole(1),
    "micro_batches": whole(1),
    "loss": NUMBER.or_null(),
    "lr": _RATES,
    "signal": NUMBER.or_null(),
    "noise": _NOT_NEGATIVE.or_null(),
    "skipped": TRUTH,
    "scores": Kind(_SCORES.words, lambda v: _SCORES.fits(v) and len(v) > 0).or_null(),
    "seconds": _SECONDS,
}
STEP_TOO = {  # not in every line
    "target": whole(1),
    "similarity": NUMBER.or_null(),
    "noise_scale": NUMBER.or_null(),
    "next_target": whole(1),
    "next_lr_factor": NUMBER.or_null(),
    "reason": TEXT,
    "factors": mapping(_FOUR, "names with a list of four numbers or nulls each"),
}
SETTINGS = {  # of config.yaml, for what a log is shown with
    "arm": TEXT,
    "seed": whole(0),
    "epochs": whole(1),
    "policy": TEXT,
    "target": NUMBER,
    "begin_from": TEXT,
    "lr_from": TEXT,
    "task": mapping(PLAIN, "names with a finite number, text, true or false each"),
}
SWEEP = {
    "tuned": TEXTS,
    "higher_is_better": TRUTH,
    "points": Kind(
        "names with the values of each, one or more",
        lambda value: mapping(mapping(PLAIN, ""), "").fits(value) and len(value) > 0,
    ),
}


def require_kinds(place: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raises RunError for the first of these values that is of another kind; absent ones are none.

    Args:
        place: the file, and the line, of the values.
        values: by name.
        kinds: by name.
    """
    for name, value in values.items():
        if name in kinds and not kinds[name].fits(value):
            raise RunError(
                f"{place}: {name} is {shortened(value)}, and must be {kinds[name].words}; "
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
    if not STEP["schema"].fits(schema):
        raise RunError(f"{place} is no step of schema {SCHEMA}, but of {shortened(schema)}")
    require_names(place, row, STEP)
    require_kinds(place, row, {**STEP, **STEP_TOO})
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
    require_kinds(str(place), settings, {**dict.fromkeys(settings, PLAIN), **SETTINGS})
