"""bigbatch: measure how much micro-batches agree; decide the batch size; scale the step.

The names follow the data: measure, decide, act, and the loop around them. They are imported, and
torch with them, when the first is asked for: `bigbatch --help` asks for none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigbatch.public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    public = import_module("bigbatch.public")
    globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    __getattr__("__all__")
    return sorted(globals())
