"""A policy of the user's own by its place: `module:Class`, or `file.py:Class`."""

import ast
import inspect
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from bigbatch.errors import SettingError
from bigbatch.policies.policy import Policy


def own_policy(text: str) -> Policy:
    """The policy of `module:Class` or `file.py:Class`, each also with `:KEY=VALUE,KEY=VALUE`.

    A module is looked for in the working directory too. A value is a literal of Python, text
    otherwise.

    Raises:
        SettingError: the place or an argument is wrong, or the class is no policy.
    """
    place, _, rest = text.partition(":")
    name, _, arguments = rest.partition(":")
    found = _names_in(place, text).get(name)
    if not inspect.isclass(found):
        raise SettingError(f"policy {text!r}: {place} has no class {name!r}; write {place}:CLASS")
    given: dict[str, Any] = {}
    for part in arguments.split(",") if arguments else []:
        key, equals, value = (one.strip() for one in part.partition("="))
        if not equals:
            raise SettingError(f"policy {text!r}: write {part.strip()!r} as KEY=VALUE")
        given[key] = _value(value)
    try:
        policy: Any = found(**given)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"policy {text!r} cannot be built: {error}; write {place}:{name}:KEY=VALUE,... with "
            f"the arguments of {name}{inspect.signature(found)}"
        ) from error
    if not callable(getattr(policy, "decide", None)):
        raise SettingError(f"policy {text!r}: {name} has no method decide(statistics, now); add it")
    own: Policy = policy
    return own


def _names_in(place: str, text: str) -> dict[str, Any]:
    """The names that a module or a file defines."""
    is_file = place.endswith(".py")
    folder = place.replace("\\", "/").rpartition("/")[0] if is_file else ""
    if folder not in sys.path:  # "" is the working directory
        sys.path.insert(0, folder)
    try:
        return vars(_load_file(place) if is_file else import_module(place))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise SettingError(
            f"policy {text!r}: {error}; name a module that Python finds, or a file: FILE.py:CLASS"
        ) from error
    except Exception as error:  # of the user's own program
        raise SettingError(
            f"policy {text!r}: {place} fails with {type(error).__name__}: {error}; correct it"
        ) from error


def _load_file(file: str) -> ModuleType:
    name = file.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
