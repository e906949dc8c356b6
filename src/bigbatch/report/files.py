"""Files and directories that are whole at any moment, and places that are free."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

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
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")  # another command may fill its own
    beside.mkdir(parents=True)
    try:
        yield beside
        try:
            beside.rename(path)
        except OSError:
            require_free(path)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def reserve(folder: Path, name: str, launch: str | None = None) -> Path:
    """The first of name-1, name-2, ... in `folder` that is free, or that this launch began.

    A free one is an empty directory from now on, so that no other command takes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        place = folder / f"{name}-{number}"
        with suppress(FileExistsError):
            place.mkdir()
            return place
        if launch is not None and launch_of(place) == launch:
            return place
        number += 1


def release(place: Path) -> None:
    """Gives a reserved place back, and a folder that held no other, if nothing has begun there."""
    with suppress(OSError):  # what is not empty stays
        place.rmdir()
        place.parent.rmdir()


def has_begun(path: Path) -> bool:
    """Whether a run or a study is there, which can be gone on with."""
    return any((path / name).exists() for name in CONFIGS)


def require_free(path: Path) -> None:
    """Raises RunError where something is at `path` already; an empty directory is nothing."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunError(
            f"{path} is already in use; nothing was overwritten: choose another --out"
            + f", or go on with --resume {path}" * has_begun(path)
        )
