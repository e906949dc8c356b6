"""Files of published data sets; errors of reading become one line."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bigbatch.errors import RunError

UTF_8 = "utf-8-sig"  # without a byte order mark
_READ_ERRORS = (EOFError, OSError, UnicodeDecodeError, tarfile.TarError, zlib.error)


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
    """Opens a text file, with gzip if its name ends in .gz.

    Raises:
        RunError: as `readable` raises it.
    """
    open_as = gzip.open if file.suffix == ".gz" else open
    with readable(file), open_as(file, "rt", encoding=UTF_8) as text:
        yield text


def text_of(file: Path) -> str:
    """The contents of a text file.

    Raises:
        RunError: as `readable` raises it.
    """
    with open_text(file) as text:
        return text.read()
