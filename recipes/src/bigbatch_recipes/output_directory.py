"""Directories of runs and studies: created atomically, reserved, and begun by one launch."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from bigbatch.errors import RunError

LAUNCH = "launch.txt"  # the launch of torchrun that began a run or a study

_UNFINISHED = ".bigbatch"  # suffix of directories that are being filled
_BEGUN = ("settings.json", "study.yaml")  # of a run, of a study


@contextmanager
def create_directory_atomically(path: Path) -> Iterator[Path]:
    """A directory to fill, which is moved to `path` at the end; after an error nothing is there.

    Directories that killed processes left in the same folder are removed.

    Raises:
        RunError: there is something at `path` already.
    """
    require_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    directory = path.with_name(f".{path.name}.{uuid4().hex[:8]}{_UNFINISHED}")
    lock = None
    try:
        lock = _create_locked(directory)
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


def _create_locked(directory: Path) -> int | None:
    """Creates an empty directory; returns its lock, or None where directories cannot be locked."""
    while True:
        directory.mkdir(exist_ok=True)
        try:
            lock = _lock_directory(directory)
        except OSError:
            return None  # no other process can lock it either, so none removes it
        if lock is not None and directory.exists():
            return lock
        if lock is not None:  # another process has just removed it as abandoned
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Removes the directories in a folder that no process is filling any more."""
    for directory in folder.glob(f".*.????????{_UNFINISHED}"):
        with suppress(OSError):
            lock = _lock_directory(directory)
            if lock is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _lock_directory(directory: Path) -> int | None:
    """Locks a directory until the descriptor is closed; None where another process has the lock.

    Raises:
        OSError: this system, or this file system, cannot lock directories.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)  # an error where there is no fcntl
    except FileNotFoundError:
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def reserve(folder: Path, name: str, launch: str | None = None) -> Path:
    """The first of name-1, name-2, ... in `folder` that is free, or that this launch began.

    A free one is created as an empty directory, so that no other command takes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"{name}-{number}"
        with suppress(FileExistsError):
            path.mkdir()
            return path
        if launch is not None and launch_of(path) == launch:
            return path
        number += 1


def release(path: Path) -> None:
    """Removes a reserved directory that is still empty, and its folder if that is empty too."""
    with suppress(OSError):  # not empty
        path.rmdir()
        path.parent.rmdir()


def launch_of(path: Path) -> str | None:
    """The launch of torchrun that began the run or study at `path`; None where none is written."""
    with suppress(OSError, UnicodeDecodeError):
        return (path / LAUNCH).read_text()
    return None


def has_begun(path: Path) -> bool:
    """Whether a run or a study is at `path`, which can be resumed."""
    return any((path / name).exists() for name in _BEGUN)


def require_free(path: Path) -> None:
    """Raises RunError where there is anything at `path` other than an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunError(
            f"{path} is already in use; nothing was overwritten: choose another place"
            + f", or continue with --resume {path}" * has_begun(path)
        )
