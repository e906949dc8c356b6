"""study.yaml: the trainings of a study, and how a sweep is shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml

from bigbatch.errors import RunError
from bigbatch.log.row_schema import SCHEMA, require_kinds, require_names, require_settings
from bigbatch.setting_types import In, Kind, Number

PREREQUISITES = ("init_from", "lr_control_from")  # settings that name a run to finish first

_SWEEP = {
    "tuned": Kind(list[str]),
    "tuning_seeds": Kind(list[Annotated[int, In("[0, 9e18]")]]),
    "higher_is_better": Kind(bool),
    "points": Kind(dict[str, dict[str, Number | str | bool | None]]),
}

# errors of yaml for other text, and of `_read_study` for another document
_UNREADABLE = (
    *(OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError),
    *(TypeError, KeyError, AttributeError),
)


def study_yaml(settings: dict[str, Any]) -> bytes:
    """Text of study.yaml."""
    document = {"kind": "study", "schema": SCHEMA, "settings": settings}
    return yaml.safe_dump(document, sort_keys=False).encode()


def _read_study(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
        kind, schema = document["kind"], document["schema"]
        settings = dict(document["settings"])
    except _UNREADABLE as error:
        raise RunError(
            f"{path} cannot be read as a study of bigbatch ({type(error).__name__}); name a "
            "directory that `bigbatch train` made"
        ) from None
    if kind != "study" or schema != SCHEMA:
        raise RunError(
            f"{path} is a {kind} of schema {schema!r}, a study of schema {SCHEMA} is "
            "needed; use the release that wrote it"
        )
    return settings


def trainings_as_dict(trainings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The trainings of a study as its file has them: what is common to all, and what each changes.

    Whole settings of 600 trainings would be 4 MB of YAML, which is slow to read.
    """
    first, *others = trainings.values()
    common = {
        name: value
        for name, value in first.items()
        if all(repr(other[name]) == repr(value) for other in others)  # 1 is not 1.0 or True
    }
    changes = {
        name: {key: value for key, value in settings.items() if key not in common}
        for name, settings in trainings.items()
    }
    return {"common": common, "trainings": changes}


def read_trainings(path: Path) -> dict[str, dict[str, Any]]:
    """The settings of every training of the study at `path`, by the name of its directory.

    Raises:
        RunError: there is no study at `path`.
    """
    file = path / "study.yaml"
    config = _read_study(file)
    common, trainings = config.get("common", {}), config.get("trainings")
    require_settings(f"{file}, common settings", common)
    if not isinstance(trainings, dict) or not trainings or not all(map(_is_file_name, trainings)):
        raise RunError(f"{file} lists no trainings; name a study of bigbatch")
    for name, settings in trainings.items():
        require_settings(f"{file}, training {name}", settings)
    return {name: {**common, **settings} for name, settings in trainings.items()}


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def read_sweep(path: Path) -> dict[str, Any] | None:
    """The description of the sweep at `path`; None for another study, or a run.

    Returns:
        tuned: settings of which each point shows only the best value.
        tuning_seeds: seeds of the trainings that choose it; none to choose by what is shown.
        higher_is_better: whether a higher main score is better.
        points: values by setting for what varies, by the names of the points.
    Raises:
        RunError: the file is damaged.
    """
    file = path / "study.yaml"
    if not file.exists():
        return None
    sweep = _read_study(file).get("sweep")
    if sweep is None:
        return None
    if not isinstance(sweep, dict):
        raise RunError(f"{file} does not say how its sweep is shown; run the sweep again")
    require_names(f"{file}, sweep", sweep, _SWEEP)
    require_kinds(f"{file}, sweep", sweep, _SWEEP)
    for name, settings in read_trainings(path).items():
        place = f"{file}, training {name}"
        require_names(place, settings, ("arm", "seed"))
        if settings["arm"] not in sweep["points"]:
            raise RunError(f"{place}: arm is {settings['arm']!r}, and must be a point of the sweep")
    return dict(sweep)


def require_sweep(path: Path) -> None:
    """Raises RunError where no sweep is at `path`."""
    if read_sweep(path) is None:
        raise RunError(f"{path} holds no sweep; name a directory that `bigbatch sweep` made")
