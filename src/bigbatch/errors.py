"""Every exception of the library, as one tree.

    BigbatchError
      ValueError: SettingError, BatchError, StateError
      RuntimeError: GradientError, LoopError, RankError, RunError
      ImportError: MissingPackageError

A message says what broke, with the value, then what is allowed or what to do.
"""

import re

# control characters but tab and newline, those that turn the direction of text, surrogates
_STEERING = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text, with escapes for characters that steer a terminal or that no file may have."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class BigbatchError(Exception):
    """Base of every error that the library raises on purpose."""


class SettingError(BigbatchError, ValueError):
    """A setting cannot work; raised at construction."""


class GradientError(BigbatchError, RuntimeError):
    """Gradients are in a state that would give a plausible but wrong number."""


class LoopError(BigbatchError, RuntimeError):
    """The training loop left out a call, repeated one, or made one too early."""


class BatchError(BigbatchError, ValueError):
    """A loader's batch cannot be cut along its samples with certainty."""


class StateError(BigbatchError, ValueError):
    """A saved state does not belong to the object that loads it."""


class RankError(BigbatchError, RuntimeError):
    """The ranks of one step disagree although they must not; raised on every rank alike."""


class RunError(BigbatchError, RuntimeError):
    """A run directory is missing, foreign, unreadable or already in use."""


class MissingPackageError(BigbatchError, ImportError):
    """An optional package is not installed; says which command brings it."""
