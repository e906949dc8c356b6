"""A line on the terminal while torch is imported, which takes seconds."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LINE = "loading torch ..."


@contextmanager
def loading_line() -> Iterator[None]:
    """Shows the line inside the block, on rank 0 and where standard error is a terminal.

    The cursor stays at its begin, so that anything else that is printed replaces it.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        yield
        return
    _write(f"{_LINE}\r")
    yield
    _write(f"{' ' * len(_LINE)}\r")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
