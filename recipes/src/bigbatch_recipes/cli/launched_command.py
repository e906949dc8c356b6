"""Runs a command on all ranks that were started for it; an error is one line of one of them."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from bigbatch.cli.exit_status import line_of
from bigbatch.errors import BigbatchError
from bigbatch.interrupts import INTERRUPTED, ignore_interrupts
from bigbatch_recipes.cli.help_sections import SectionedCommand
from bigbatch_recipes.process_group import is_rank_zero
from bigbatch_recipes.torchrun import Launch, stdout_of_rank_zero


def typer_command(function: Callable[..., None]) -> Any:
    """The command with the options of a function."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=SectionedCommand)(function)
    return get_command(app)


def run(name: str, function: Callable[..., None], arguments: list[str]) -> NoReturn:
    """Runs the command line of a function on all ranks, and exits."""
    if not is_rank_zero():
        warnings.showwarning = _ignore_warning
    launch = Launch()
    try:
        try:
            launch = Launch.join(trains=name == "train")
            with stdout_of_rank_zero():
                command = typer_command(function)
                status = command(arguments, f"bigbatch {name}", standalone_mode=False, obj=launch)
                status = status or 0
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
    """The message of an error, without the traceback that torch adds in a DataLoader worker."""
    if isinstance(error, TyperException):
        return str(error.format_message())
    text, name = line_of(error), type(error).__name__
    if f"Caught {name} in DataLoader worker process" in text:
        return text.rpartition(f"{name}: ")[2]
    return text


def _ignore_warning(*_: Any, **__: Any) -> None:
    """Rank 0 says it."""
