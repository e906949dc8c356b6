"""Files that are read as they were published, or said to be damaged, in one line."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bigbatch.errors import RunError

UTF_8 = "utf-8-sig"  # a mark of the byte order is no text
_DAMAGES = (EOFError, OSError, UnicodeDecodeError, tarfile.TarError, zlib.error)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Reading the file in here fails by name.

    Raises:
        RunError: it cannot be read, what packed it is damaged, or it is no UTF-8 where text is.
    """
    try:
        yield
    except _DAMAGES as error:
        raise RunError(
            f"{file} cannot be read ({type(error).__name__}: {error}); fetch it again, whole"
        ) from error


@contextmanager
def opened(file: Path) -> Iterator[TextIO]:
    """A file of text, out of gzip where its name ends in .gz.

    Raises:
        RunError: as of `readable`.
    """
    open_as = gzip.open if file.suffix == ".gz" else open
    with readable(file), open_as(file, "rt", encoding=UTF_8) as text:
        yield text


def text_of(file: Path) -> str:
    """All of a file of text.

    Raises:
        RunError: as of `readable`.
    """
    with opened(file) as text:
        return text.read()
