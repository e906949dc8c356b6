"""The command line: advise, list, train, sweep, compare, report, replay, bench, results."""

import atexit
import os
import sys
from typing import NoReturn

from bigbatch.cli.loading_line import loading_line
from bigbatch.interrupts import exit_on_interrupt, handle_interrupts, ignore_interrupts

_WITHOUT_TORCH: tuple[list[str], ...] = ([], ["--help"], ["--version"])  # arguments


def main() -> None:
    """Runs a command, or lists the commands. An interrupt prints one line at any moment.

    `advise` runs the user's program, whose own interrupts, warnings and ranks these are.
    """
    if sys.argv[1:2] == ["advise"]:
        with loading_line():
            from bigbatch.cli.advise_command import advise

        advise(sys.argv[2:])
    with handle_interrupts(exit_on_interrupt):
        atexit.register(ignore_interrupts)  # while Python shuts down
        try:
            from bigbatch.cli.app import app

            if sys.argv[1:2] in _WITHOUT_TORCH:
                if os.environ.get("RANK", "0") == "0":
                    app()
                return
            with loading_line():
                from bigbatch.cli.exit_status import run  # imports torch
        except ImportError as error:
            _exit_without_package(error)
        run(app)


def _exit_without_package(error: ImportError) -> NoReturn:
    """Exits with one line, on rank 0, that names the command which installs the package."""
    from bigbatch.errors import MissingPackageError
    from bigbatch.optional_packages import import_optional

    try:
        import_optional("typer", "cli")
        raise error
    except MissingPackageError as missing:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"bigbatch: {missing}\n")
        sys.exit(2)
