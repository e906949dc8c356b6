"""Ctrl-C during a command, from its first import to its end: exit status 130, at most one line.

It imports no slow module, so that the first handler is set at once.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


@contextmanager
def handle_interrupts(handler: Any) -> Iterator[None]:
    """Inside the block an interrupt calls `handler`, or is ignored by `signal.SIG_IGN`.

    Nothing changes if interrupts are ignored already, as for a background command of a shell.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def exit_on_interrupt(number: int, frame: object) -> None:
    """Ends the process at once, before anything needs to be closed; rank 0 prints a line."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"bigbatch: interrupted\n")
    os._exit(INTERRUPTED)


def ignore_interrupts() -> None:
    """Ignores interrupts from now on, while the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
