"""Runs a command to its exit status; an expected error is one line on standard error."""

import errno
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from bigbatch.errors import BigbatchError, printable
from bigbatch.interrupts import INTERRUPTED, handle_interrupts, ignore_interrupts

Command = Callable[[list[str]], int | None]


def run_command(command: Command, arguments: list[str]) -> int:
    """Runs a command; returns its status, 2 after an expected error, 130 after an interrupt."""
    warnings.showwarning = partial(_show_warning, set())
    try:
        with handle_interrupts(signal.default_int_handler):
            return command(arguments) or 0
    except (BigbatchError, OSError) as error:
        write_line(line_of(error))
        return 2
    except KeyboardInterrupt:
        write_line("interrupted")
        return INTERRUPTED
    finally:
        ignore_interrupts()


def write_line(message: str) -> None:
    """Writes one line to standard error."""
    sys.stderr.write(one_line(message))


def one_line(message: str) -> str:
    """A message as one line of the command's, without characters that steer a terminal."""
    return f"bigbatch: {' '.join(printable(message).split())}\n"


def line_of(error: Exception) -> str:
    """What an expected error says."""
    if isinstance(error, OSError) and not isinstance(error, BigbatchError):
        if error.filename is None:  # a damaged image, or locks that a file system lacks
            return f"{type(error).__name__}: {error.strerror or error}"
        is_long = error.errno == errno.ENAMETOOLONG
        remedy = "give a shorter one" if is_long else "name a place that can be written"
        return f"{error.filename}: {error.strerror}; {remedy}"
    return str(error)


def _show_warning(shown: set[str], message: Warning | str, *_: Any, **__: Any) -> None:
    """Writes a warning as one line, once."""
    if str(message) not in shown:
        shown.add(str(message))
        write_line(f"note: {message}")
