"""Files and directories that are whole at any moment, and places that are free."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from bigbatch.errors import RunError
from bigbatch.runs.run_config import CONFIGS, launch_of

MAKER = "bigbatch"  # as pages and figures name what made them

_MAKING = ".bigbatch"  # ends the names of directories that are being made
_MADE_BY = (  # how a page, a PNG and an SVG say it
    f'<meta name="generator" content="{MAKER}">',
    f"Software\0{MAKER}",
    f"<dc:title>{MAKER}</dc:title>",
)
_HEAD = 4096  # bytes of a file within which it does


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Replaces `path` as a whole: at any moment it holds the old bytes or the new ones."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by these bytes."""
    with open_atomically(path) as file:
        file.write(data)


@contextmanager
def create_directory_atomically(path: Path) -> Iterator[Path]:
    """A directory to fill, which is at `path` afterwards; if that fails, nothing is there.

    What a process that was killed meanwhile left in the same folder is taken away.

    Raises:
        RunError: there is something at `path` already.
    """
    require_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_left(path.parent)
    directory = path.with_name(f".{path.name}.{uuid4().hex[:8]}{_MAKING}")
    lock = None
    try:
        lock = _made(directory)
        yield directory
        try:
            directory.rename(path)
        except OSError:
            require_free(path)
            raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _made(directory: Path) -> int | None:
    """Makes an empty directory; returns what holds it, where directories can be locked."""
    while True:
        directory.mkdir(exist_ok=True)
        try:
            lock = _hold(directory)
        except OSError:
            return None  # no other process can hold it either, so none takes it away
        if lock is not None and directory.exists():
            return lock
        if lock is not None:  # another has just taken it for one that was left
            os.close(lock)


def _clear_left(folder: Path) -> None:
    """Takes away the directories in a folder that no process is filling any more."""
    for left in folder.glob(f".*.????????{_MAKING}"):
        with suppress(OSError):
            lock = _hold(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _hold(directory: Path) -> int | None:
    """Holds a directory until this is closed, or the process ends; None where another one does.

    Raises:
        OSError: this system, or this file system, holds no directories.
    """
    try:
        opened = os.open(directory, os.O_RDONLY)  # refused where there is no fcntl
    except FileNotFoundError:
        return None
    import fcntl

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return opened


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
    """Gives a reserved place back, and a folder that holds no other, if nothing has begun there."""
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
            f"{path} is already in use; nothing was overwritten: choose another place"
            + f", or continue with --resume {path}" * has_begun(path)
        )


def require_ours(out: Path) -> None:
    """Raises RunError where there is a file at `out` already that bigbatch did not write."""
    if not out.exists():
        return
    if not out.is_file():
        raise RunError(f"{out} is no file; give another name")
    with out.open("rb") as file:
        head = file.read(_HEAD)
    if head and not any(said.encode() in head for said in _MADE_BY):
        raise RunError(
            f"{out} was not written by bigbatch and is left as it is; move it away, or give "
            "another name"
        )
