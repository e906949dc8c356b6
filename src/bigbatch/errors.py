"""Every exception of the library, as one tree.

    BigbatchError
      SettingError (ValueError)       a setting that cannot work; raised at construction
      GradientError (RuntimeError)    gradients in a state that would give a wrong number
      LoopError (RuntimeError)        the training loop was not followed
      LengthError (TypeError)         the length of what has none that is known beforehand
      BatchError (ValueError)         a batch that cannot be cut into micro-batches
      StateError (ValueError)         a saved state that does not belong here
      RankError (RuntimeError)        ranks that should agree and do not
      RunError (RuntimeError)         a run directory that cannot be used
      MissingPackageError (ImportError)  an optional package that is not installed

A message says what broke with the value seen, then what is allowed or what to do.
"""


class BigbatchError(Exception):
    """Base of every error that the library raises on purpose."""


class SettingError(BigbatchError, ValueError):
    """A setting that cannot work, found at construction."""


class GradientError(BigbatchError, RuntimeError):
    """Gradients are in a state from which a plausible but wrong number would be read."""


class LoopError(BigbatchError, RuntimeError):
    """The training loop left out a call, repeated one, or made one too early."""


class LengthError(BigbatchError, TypeError):
    """A length was asked for that nobody knows; a TypeError, as Python's own, which tqdm takes."""


class BatchError(BigbatchError, ValueError):
    """A loader's batch cannot be cut along its samples with certainty."""


class StateError(BigbatchError, ValueError):
    """A saved state does not belong to the object that is asked to load it."""


class RankError(BigbatchError, RuntimeError):
    """The ranks of one step disagree where they must not; raised on every rank alike."""


class RunError(BigbatchError, RuntimeError):
    """A run directory is missing, foreign, unreadable or already in use."""


class MissingPackageError(BigbatchError, ImportError):
    """An optional package is not installed; says which command brings it."""
