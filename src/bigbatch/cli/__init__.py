"""The command line: train, sweep, compare, report, replay, recipes, bench."""

import atexit
import sys

from bigbatch.interrupts import ignore, interrupts_by, leave

_LISTED: tuple[list[str], ...] = ([], ["--help"], ["--version"])  # what needs no torch


def main() -> None:
    """Runs the command; where none is named, shows them. An interrupt is one line at any moment."""
    with interrupts_by(leave):
        atexit.register(ignore)  # while Python takes itself apart
        from bigbatch.cli.app import app, show

        if sys.argv[1:2] in _LISTED:
            show()
            return
        from bigbatch.cli.exit_status import run  # and torch with it

        run(app)
