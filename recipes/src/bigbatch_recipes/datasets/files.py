"""Files of published data sets: their location; errors of reading become one line."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bigbatch.errors import RunError

DEFAULT_FOLDER = Path("data")  # searched without --data


@dataclass(frozen=True)
class DatasetLocation:
    """A data set in its published layout."""

    name: str  # its name
    folders: Sequence[str] = ()  # names of its folder, which may be in the folder that is searched
    # patterns, one of which its folder must match; () if it needs no files
    files: Sequence[str] = ()
    source: str = ""  # publisher and web page
    size: str = ""  # its size in words
    otherwise: str = ""  # the data that are used without a folder; "" for none
    other_files: Sequence[str] = ()  # other files that are needed

    def find(self, given: Path | None) -> Path | None:
        """The folder with the files: the given one, or `data`, or a subfolder of it.

        Returns:
            None if no folder is given or found, and the recipe has other data to train on.
        Raises:
            RunError: the files are missing; names them and their source.
        """
        root = DEFAULT_FOLDER if given is None else given
        for folder in (root, *(root / name for name in self.folders)):
            if any(next(folder.glob(pattern), None) for pattern in self.files):
                return folder.resolve()
        if given is None and self.otherwise:
            return None
        raise RunError(
            f"{self.name} is not in {root}: {self.needed} must be there, or "
            f"in a folder {' or '.join(self.folders)} of it; name the place by --data"
        )

    @property
    def needed(self) -> str:
        """The files and their source."""
        files = " or ".join(self.files)
        return f"{', and '.join((files, *self.other_files))} of {self.source}"

    def file_in(self, folder: Path, name: str) -> Path:
        """The file of this name in the folder, plain or with .gz.

        Raises:
            RunError: neither is there.
        """
        for file in (folder / name, folder / f"{name}.gz"):
            if file.exists():
                return file
        raise self.missing_file(folder / name)

    def missing_file(self, file: Path) -> RunError:
        """The error to raise if a file is not in the folder."""
        return RunError(f"{file} is missing; needed are {self.needed}")


_READ_ERRORS = (EOFError, OSError, UnicodeDecodeError, zlib.error)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Errors of reading the file in this context name the file.

    Raises:
        RunError: the file cannot be read, its compressed data are damaged, or text is not UTF-8.
    """
    try:
        yield
    except _READ_ERRORS as error:
        raise RunError(
            f"{file} cannot be read ({type(error).__name__}: {error}); fetch it again, whole"
        ) from error


@contextmanager
def open_text(file: Path) -> Iterator[TextIO]:
    """Opens a text file, with gzip if its name ends in .gz."""
    open_as = gzip.open if file.suffix == ".gz" else open
    with readable(file), open_as(file, "rt", encoding="utf-8-sig") as text:  # no byte order mark
        yield text


def text_of(file: Path) -> str:
    """The contents of a text file."""
    with open_text(file) as text:
        return text.read()
