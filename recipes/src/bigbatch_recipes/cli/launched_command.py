"""Runs a command on all ranks that were started for it; an error is one line of one of them."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from bigbatch.cli.exit_status import line_of
from bigbatch.errors import BigbatchError
from bigbatch.interrupts import INTERRUPTED, ignore_interrupts
from bigbatch_recipes.process_group import is_rank_zero
from bigbatch_recipes.torchrun import Launch, stdout_of_rank_zero

Command = Callable[[list[str], Launch], int | None]


def run(name: str, function: Command, arguments: list[str]) -> NoReturn:
    """Runs a command on all ranks, and exits."""
    if not is_rank_zero():
        warnings.showwarning = _ignore_warning
    launch = Launch()
    try:
        try:
            launch = Launch.join(trains=name == "train")
            with stdout_of_rank_zero():
                status = function(arguments, launch) or 0
        finally:
            ignore_interrupts()
    except (BigbatchError, OSError) as error:
        launch.report_error(_line_of(error))
        status = 2
    except KeyboardInterrupt:
        launch.report_error("interrupted")
        status = INTERRUPTED
    except Exception as error:
        launch.report_failure(error)
        status = 1
    except SystemExit as ending:
        launch.end(ending.code)
    launch.end(status)


def _line_of(error: Exception) -> str:
    """The message of an error, without the traceback that torch adds in a DataLoader worker."""
    text, name = line_of(error), type(error).__name__
    if f"Caught {name} in DataLoader worker process" in text:
        return text.rpartition(f"{name}: ")[2]
    return text


def _ignore_warning(*_: Any, **__: Any) -> None:
    """Rank 0 says it."""
