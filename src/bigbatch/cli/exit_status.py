"""Runs a command to its exit status; an expected error is one line on standard error."""

import signal
import sys
import warnings
from functools import partial
from typing import Any

import typer
from typer.exceptions import TyperException

from bigbatch.errors import BigbatchError
from bigbatch.interrupts import INTERRUPTED, handle_interrupts, ignore_interrupts
from bigbatch_recipes.process_group import is_rank_zero
from bigbatch_recipes.torchrun import Launch, stdout_of_rank_zero


def run(app: typer.Typer) -> None:
    """Runs the command line on all ranks that were started for it, and exits."""
    warnings.showwarning = partial(_one_line_warning, set())
    launch = Launch()
    try:
        try:
            launch = Launch.join(trains=sys.argv[1:2] == ["train"])
            with stdout_of_rank_zero(), handle_interrupts(signal.default_int_handler):
                status = app(standalone_mode=False, obj=launch) or 0
        finally:
            ignore_interrupts()
    except (BigbatchError, TyperException, OSError) as error:
        launch.report_error(_line_of(error))
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        launch.report_failure(error)
        status = 1
    except SystemExit as ending:
        launch.end(ending.code)
    if status == INTERRUPTED:  # which typer may return too
        launch.report_error("interrupted")
    launch.end(status)


def _line_of(error: Exception) -> str:
    if isinstance(error, TyperException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror is None:  # a damaged image, say
        return f"{type(error).__name__}: {_message_of(error)}"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}; name a place that can be written"
    return _message_of(error)


def _message_of(error: Exception) -> str:
    """The message of an error, without the traceback that torch adds in a DataLoader worker."""
    text, name = str(error), type(error).__name__
    if text.startswith(f"Caught {name} in DataLoader worker process"):
        return text.rpartition(f"{name}: ")[2]
    return text


def _one_line_warning(shown: set[str], message: Warning | str, *_: Any, **__: Any) -> None:
    if is_rank_zero() and str(message) not in shown:
        shown.add(str(message))
        sys.stderr.write(f"bigbatch: note: {message}\n")
