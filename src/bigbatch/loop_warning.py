"""Warnings that name the line of the user's loop."""

import sys
import warnings

_NOT_OF_LOOP = ("bigbatch.", "contextlib", "torch.")


def warn_in_loop(message: str) -> None:
    """Warns at the first line on the stack that is neither this library's nor torch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_OF_LOOP):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
