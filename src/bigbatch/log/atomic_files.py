"""Files that are written atomically and overwrite nothing of others; locks of folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bigbatch.errors import RunError

GENERATOR = "bigbatch"  # in the metadata of pages and figures

_GENERATED = (  # marks of our pages and figures
    f'<meta name="generator" content="{GENERATOR}">',
    f'<svg data-generator="{GENERATOR}"',
)
_HEAD = 4096  # bytes at the start of a file that have the mark
_SHORT = 60  # letters of a name, in at most 240 of the 255 bytes that a name may have


def expanded_path(text: str | Path) -> Path:
    """The path, where `~` is the user's home."""
    with suppress(RuntimeError):  # no such user
        return Path(text).expanduser()
    return Path(text)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` at the end: `path` has the old bytes or the new ones."""
    new = path.with_name(f".{path.name[:_SHORT]}.new")
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


def lock_folder(folder: Path) -> int:
    """Locks a folder for this process, which the system releases when the process ends.

    A process that was forked does not have the lock. A file system that cannot lock refuses none.

    Returns:
        A descriptor; closing it releases the lock.
    Raises:
        RunError: another process has the lock.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        _lock(descriptor, waits=False)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise RunError(
            f"{folder} is in use by another process; wait for it, or train elsewhere"
        ) from None
    except OSError:
        pass  # this file system cannot lock
    return descriptor


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Waits until no other process has locked this file, and locks it for the block.

    A file system that cannot lock refuses none.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with suppress(OSError):
            _lock(descriptor, waits=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, waits: bool) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        import msvcrt

        how = msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK  # type: ignore[attr-defined]
        msvcrt.locking(descriptor, how, 1)  # type: ignore[attr-defined]
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def require_own_file(out: Path) -> None:
    """Raises RunError where there is a file at `out` that bigbatch did not write."""
    if not out.exists():
        return
    if not out.is_file():
        raise RunError(f"{out} is not a file; give another name")
    with out.open("rb") as file:
        head = file.read(_HEAD)
    if head and not any(mark.encode() in head for mark in _GENERATED):
        raise RunError(
            f"{out} was not written by bigbatch and is left as it is; move it away, or give "
            "another name"
        )
