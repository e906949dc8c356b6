"""New directories of runs and studies: a free name, created atomically, never overwritten."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from bigbatch.errors import RunError
from bigbatch.log.row_schema import SETTINGS
from bigbatch_recipes.run_config import STUDY

LAUNCH = "launch.txt"  # the launch of torchrun that began a run or a study


@contextmanager
def create_directory_atomically(path: Path) -> Iterator[Path]:
    """A directory to fill, which is moved to `path` at the end; after an error nothing is there.

    Raises:
        RunError: there is something at `path` already.
    """
    require_free(path)
    directory = path.with_name(f".{uuid4().hex}")  # short, as the name itself may be long
    directory.mkdir(parents=True)
    try:
        yield directory
        try:
            directory.rename(path)
        except OSError:
            require_free(path)
            raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
    return any((path / name).exists() for name in (SETTINGS, STUDY))


def require_free(path: Path) -> None:
    """Raises RunError where there is anything at `path` other than an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise RunError(
            f"{path} is already in use; nothing was overwritten: choose another place"
            + f", or continue with --resume {path}" * has_begun(path)
        )
