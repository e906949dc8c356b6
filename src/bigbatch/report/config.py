"""The config file of a run or a study: what it is, and with which settings."""

import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from bigbatch.errors import RunError

SCHEMA = 2
BEFORE = ("begin_from", "lr_from")  # settings that name a run which has to be finished before
CONFIGS = ("config.yaml", "study.yaml")  # of a run, of a study


def describe(
    kind: Literal["run", "study"], settings: dict[str, Any], launch: str | None = None
) -> bytes:
    """A config file: what it is, the settings, what they ran on, and which launch began it."""
    about = {
        "kind": kind,
        "schema": SCHEMA,
        "settings": settings,
        "versions": {
            "bigbatch": metadata.version("bigbatch"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **{name: metadata.version(name) for name in ("numpy", "scikit-learn")},
        },
        "machine": platform.platform(),
        **({"launch": launch} if launch else {}),
    }
    return yaml.safe_dump(about, sort_keys=False).encode()


def read_config(path: Path, kind: Literal["run", "study"]) -> dict[str, Any]:
    """The settings of a run or study.

    Raises:
        RunError: the file is unreadable, of another kind, or of a newer schema.
    """
    try:
        about = yaml.safe_load(path.read_text())
        found, schema, settings = about["kind"], about["schema"], dict(about["settings"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
        raise RunError(
            f"{path} cannot be read as a {kind} of bigbatch ({type(error).__name__}); name a "
            "directory that `bigbatch train` made"
        ) from None
    if found != kind or schema != SCHEMA:
        raise RunError(
            f"{path} is a {found} of schema {schema!r}, a {kind} of schema {SCHEMA} is needed; use "
            "the release that wrote it"
        )
    return settings


def launch_of(path: Path) -> str | None:
    """The launch of torchrun that began the run or study at `path`, where one is written there."""
    for name in CONFIGS:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            about = yaml.safe_load((path / name).read_text())
            if isinstance(about, dict) and "launch" in about:
                return str(about["launch"])
    return None


def read_trainings(path: Path) -> dict[str, dict[str, Any]]:
    """The settings of every training of the study at `path`, by the name of its directory.

    Raises:
        RunError: it is no study.
    """
    trainings = read_config(path / "study.yaml", "study").get("trainings")
    well_formed = isinstance(trainings, dict) and all(
        isinstance(settings, dict) and Path(str(name)).name == name
        for name, settings in trainings.items()
    )
    if not trainings or not well_formed:
        raise RunError(f"{path / 'study.yaml'} lists no trainings; name a study of bigbatch")
    return dict(trainings)


def read_sweep(path: Path) -> dict[str, Any] | None:
    """How the sweep at `path` is to be shown; None for another study, or a run.

    Returns:
        tuned: settings of which each point shows the best alone.
        higher_is_better: of the score that counts.
        points: what varies, as values by setting, by the names of the points.
    Raises:
        RunError: the file is damaged.
    """
    if not (path / "study.yaml").exists():
        return None
    sweep = read_config(path / "study.yaml", "study").get("sweep")
    if sweep is None:
        return None
    if not isinstance(sweep, dict) or not sweep.keys() >= {"tuned", "higher_is_better", "points"}:
        raise RunError(f"{path / 'study.yaml'} does not say how its sweep is shown; sweep anew")
    return dict(sweep)
