"""`loads_state`, which refuses what is no state of an object, whatever else it is."""

import reprlib
from collections.abc import Callable, Mapping
from functools import wraps
from traceback import walk_tb
from typing import Any, TypeVar

from bigbatch.errors import BigbatchError, StateError
from bigbatch.setting_types import Kind

Load = TypeVar("Load", bound=Callable[..., None])

_READ_WRONGLY = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_READERS = ("bigbatch.", "torch.optim.", "random")  # modules that read states


def loads_state(**annotations: Any) -> Callable[[Load], Load]:
    """Decorates a `load_state_dict`: a state of another object or shape is a StateError.

    An error of code that the state belongs to, such as a policy or a data set, is left as it is.

    Args:
        annotations: the values that the state must have, by name.
    """
    kinds = {name: Kind(annotation) for name, annotation in annotations.items()}

    def decorate(load: Load) -> Load:
        @wraps(load)
        def checked_load(self: Any, *args: Any, **kwargs: Any) -> None:
            state = next(iter((*args, *kwargs.values())), None)
            try:
                require_values(self, state, kinds)
                load(self, *args, **kwargs)
            except _READ_WRONGLY as error:
                *_, (frame, _) = walk_tb(error.__traceback__)
                own = frame.f_globals.get("__name__", "").startswith(_READERS)
                if isinstance(error, BigbatchError) or not own:
                    raise
                raise _refusal(self, state, f"{type(error).__name__}: {error}") from error

        return checked_load  # type: ignore[return-value]

    return decorate


def require_values(owner: object, state: Any, kinds: Mapping[str, Kind]) -> None:
    """Raises StateError where a state is no mapping with a value of each kind."""
    if not isinstance(state, Mapping):
        raise _refusal(owner, state, "it is no dict")
    for name, kind in kinds.items():
        if name not in state:
            raise _refusal(owner, state, f"it lacks {name!r}")
        if state[name] not in kind:
            raise _refusal(owner, state, f"{name} is {reprlib.repr(state[name])}, and not {kind}")


def _refusal(owner: object, state: Any, reason: str) -> StateError:
    names = f"with {sorted(map(str, state))[:5]}" if isinstance(state, Mapping) else ""
    return StateError(
        f"a state {names or f'of type {type(state).__name__}'} is not one of "
        f"{type(owner).__name__} ({reason}); pass what its state_dict() gave"
    )
