"""The command line: train, sweep, compare, report, replay, recipes, bench."""

import atexit
import os
import sys
from typing import NoReturn

from bigbatch.errors import MissingPackageError
from bigbatch.interrupts import ignore, interrupts_by, leave
from bigbatch.optional_packages import required

_LISTED: tuple[list[str], ...] = ([], ["--help"], ["--version"])  # these need no torch


def main() -> None:
    """Runs the command, or lists the commands. An interrupt prints one line at any moment."""
    with interrupts_by(leave):
        atexit.register(ignore)  # while Python shuts down
        try:
            required("typer", "cli")
            from bigbatch.cli.app import app, show

            if sys.argv[1:2] in _LISTED:
                show()
                return
            from bigbatch.cli.exit_status import run  # imports torch
        except MissingPackageError as error:
            _exit_without(error)
        run(app)


def _exit_without(error: MissingPackageError) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"bigbatch: {error}\n")
    sys.exit(2)
