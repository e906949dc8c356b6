"""bigbatch: measures how much micro-batches agree, decides the batch size, and scales the step.

The public names, and torch with them, are imported when the first of them is used:
`bigbatch --help` uses none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigbatch.public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    public = import_module("bigbatch.public")
    names = {name: value for name, value in vars(public).items() if not name.startswith("_")}
    globals().update(names, __all__=sorted(names))
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    __getattr__("__all__")
    return sorted(globals())
