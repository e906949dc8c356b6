"""study.json: the trainings of a study, and how a sweep is shown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from bigbatch.errors import RunError
from bigbatch.log.row_schema import SCHEMA, require_kinds, require_names, require_settings
from bigbatch.setting_types import In, Kind, Number

STUDY = "study.json"
PREREQUISITES = ("init_from", "lr_control_from")  # settings that name a run to finish first

_SWEEP = {
    "tuned": Kind(list[str]),
    "tuning_seeds": Kind(list[Annotated[int, In("[0, 9e18]")]]),
    "higher_is_better": Kind(bool),
    "points": Kind(dict[str, dict[str, Number | str | bool | None]]),
}


class Study(NamedTuple):
    """The file of a study."""

    trainings: dict[str, dict[str, Any]]  # settings of each, by the name of its directory
    # of a sweep: `tuned`, settings of which each point shows only the best value; `tuning_seeds`,
    # seeds of the trainings that choose it, none to choose by what is shown; `higher_is_better`, of
    # the main score; `points`, values by setting for what varies, by the names of the points
    sweep: dict[str, Any] | None


def study_json(
    trainings: Mapping[str, Mapping[str, Any]], sweep: Mapping[str, Any] | None = None
) -> bytes:
    """Text of study.json."""
    document = {"schema": SCHEMA, "trainings": trainings, "sweep": sweep}
    return json.dumps(document, indent=1).encode()


def read_study(path: Path) -> Study:
    """The study at `path`.

    Raises:
        RunError: there is none, or its file is damaged.
    """
    file = path / STUDY
    try:
        document = json.loads(file.read_bytes())
        schema, trainings, sweep = (document[name] for name in ("schema", *Study._fields))
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise RunError(
            f"{file} cannot be read as a study of bigbatch ({type(error).__name__}); name a "
            "directory that `bigbatch train` made"
        ) from None
    if schema != SCHEMA:
        raise RunError(
            f"{file} is of schema {schema!r}, and {SCHEMA} is needed; use the release that wrote it"
        )
    if not isinstance(trainings, dict) or not trainings or not all(map(_is_file_name, trainings)):
        raise RunError(f"{file} lists no trainings; name a study of bigbatch")
    for name, settings in trainings.items():
        require_settings(f"{file}, training {name}", settings)
    if sweep is not None:
        _require_shown(file, trainings, sweep)
    return Study(trainings, sweep)


def _is_file_name(name: str) -> bool:
    return name not in ("", "..") and Path(name).name == name


def _require_shown(file: Path, trainings: Mapping[str, Any], sweep: Any) -> None:
    if not isinstance(sweep, dict):
        raise RunError(f"{file} does not say how its sweep is shown; run the sweep again")
    require_names(f"{file}, sweep", sweep, _SWEEP)
    require_kinds(f"{file}, sweep", sweep, _SWEEP)
    for name, settings in trainings.items():
        place = f"{file}, training {name}"
        require_names(place, settings, ("arm", "seed"))
        if settings["arm"] not in sweep["points"]:
            raise RunError(f"{place}: arm is {settings['arm']!r}, and must be a point of the sweep")


def read_sweep(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The trainings of the sweep at `path`, and how it is shown.

    Raises:
        RunError: no sweep is there, or its file is damaged.
    """
    trainings, sweep = read_study(path) if (path / STUDY).exists() else ({}, None)
    if sweep is None:
        raise RunError(f"{path} holds no sweep; name a directory that `bigbatch sweep` made")
    return trainings, sweep
