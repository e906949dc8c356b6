"""`loads_state`, by which every `load_state_dict` refuses what is no state of its object."""

from collections.abc import Callable, Mapping
from functools import wraps
from traceback import walk_tb
from typing import Any, TypeVar

from bigbatch.errors import BigbatchError, StateError

Load = TypeVar("Load", bound=Callable[..., None])

_READ_WRONGLY = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
# modules that read states
_READERS = ("bigbatch.", "torch.optim.", "torch.random", "random", "numpy.random")


def loads_state(load: Load) -> Load:
    """Decorates a `load_state_dict`: an error of reading the state becomes a StateError.

    One of code that the state belongs to, such as a policy or a data set, stays as it is.
    """

    @wraps(load)
    def checked_load(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            load(self, *args, **kwargs)
        except _READ_WRONGLY as error:
            from torch import OutOfMemoryError  # seconds, where nothing is loaded

            *_, (frame, _) = walk_tb(error.__traceback__)
            is_ours = frame.f_globals.get("__name__", "").startswith(_READERS)
            if isinstance(error, (BigbatchError, OutOfMemoryError)) or not is_ours:
                raise
            state = next(iter((*args, *kwargs.values())), None)
            names = f"with {sorted(map(str, state))[:5]}" if isinstance(state, Mapping) else ""
            raise StateError(
                f"a state {names or f'of type {type(state).__name__}'} is not one of "
                f"{type(self).__name__} ({type(error).__name__}: {error}); pass what its "
                "state_dict() gave"
            ) from error

    return checked_load  # type: ignore[return-value]
