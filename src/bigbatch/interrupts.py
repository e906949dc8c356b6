"""Ctrl-C of the command line, from its first import to its end: exit status 130, one line at most.

`signal` alone is imported here: nothing slow comes before the first handler.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


@contextmanager
def handle_interrupts(handler: Any) -> Iterator[None]:
    """In here an interrupt calls `handler`, or is ignored by `signal.SIG_IGN`.

    Nothing changes where interrupts are ignored already, as for a command in a shell's background.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_on_interrupt(number: int, frame: object) -> None:
    """Ends the process at once, where nothing has begun that has to be closed; rank 0 says so."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"bigbatch: interrupted\n")
    os._exit(INTERRUPTED)


def ignore_interrupts() -> None:
    """From here on an interrupt is nothing: what is left is to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
