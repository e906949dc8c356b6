"""Files and directories that are whole at any moment, and places that are free."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from bigbatch.errors import RunError
from bigbatch.report.config import CONFIGS, launch_of


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replaces `path` as a whole: at any moment it holds the old bytes or the new ones."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by these bytes."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A directory to fill, which is at `path` afterwards; if that fails, nothing is there.

    Raises:
        RunError: there is something at `path` already.
    """
    require_free(path)
    beside = path.with_name(f".{path.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    beside.rename(path)


def fresh_name(folder: Path, name: str, launch: str | None = None) -> Path:
    """The first of name-1, name-2, ... in `folder` that is free, or that this launch began."""
    number = 1
    while (place := folder / f"{name}-{number}").exists():
        if launch is not None and launch_of(place) == launch:
            break
        number += 1
    return place


def has_begun(path: Path) -> bool:
    """Whether a run or a study is there, which can be gone on with."""
    return any((path / name).exists() for name in CONFIGS)


def require_free(path: Path) -> None:
    """Raises RunError where something is at `path` already."""
    if path.exists():
        raise RunError(
            f"{path} is already in use; nothing was overwritten: choose another --out"
            + f", or go on with --resume {path}" * has_begun(path)
        )
