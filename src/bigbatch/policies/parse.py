"""Policies by name or by place, as a command line has them."""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from importlib import import_module
from runpy import run_path
from typing import Any

from bigbatch.errors import SettingError
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.goodput import Goodput
from bigbatch.policies.lr_policies import LateSwitch, Seesaw
from bigbatch.policies.policy import Fixed, NoiseScale, Policy, SimiGrad, require_policy
from bigbatch.setting_types import parse_setting

POLICIES: dict[str, type[Any]] = {
    "fixed": Fixed,
    "simigrad": SimiGrad,
    "noise-scale": NoiseScale,
    "goodput": Goodput,
    "schedule": Schedule,
    "seesaw": Seesaw,
    "late-switch": LateSwitch,
}
_SEMICOLONS = ("schedule", "seesaw", "late-switch")  # their arguments contain commas


def parse_policy(text: str) -> Policy:
    """Parses a policy: `NAME`, `NAME:KEY=VALUE,KEY=VALUE` or `NAME:VALUE,...`.

    Or one of your own: `module:Class` or `file.py:Class`, each also with `:KEY=VALUE,KEY=VALUE`,
    whose values are literals of Python, text otherwise. Modules of the working directory count too.

    A value without a key, and without =, is the first argument's. Schedules and policies contain
    commas: semicolons separate the arguments of schedule, seesaw and late-switch.

    Raises:
        SettingError: the name or a key is unknown, or a value is missing, out of range, not of its
            argument's type, or given twice.
    Example:
        >>> parse_policy("simigrad:target=0.3,max_batch=512")
        SimiGrad(target=0.3, min_batch=None, max_batch=512, grow=1.1, shrink=0.9)
        >>> parse_policy("schedule:64, x2 every 2M tokens; tokens_per_sample=512").batch_size
        64
        >>> parse_policy("late-switch:0.3; policy=simigrad:0.3,max_batch=512").policy.target
        0.3
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    if is_own(text):
        return _own_policy(text)
    arguments = arguments_of(name)
    values: dict[str, Any] = {}
    for part in rest.split(";" if name in _SEMICOLONS else ",") if rest else []:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals and not values:
            key, value = next(iter(arguments)), key
        if key not in arguments or not value:
            raise SettingError(f"policy {text!r}: {part.strip()!r} is none of {_usage(name)}")
        if key in values:
            raise SettingError(f"policy {text!r} gives {key} twice; leave one out")
        is_text = key in _NESTED
        values[key] = value if is_text else parse_setting(key, value, arguments[key].type)
    if any(field.default is MISSING and key not in values for key, field in arguments.items()):
        raise SettingError(f"policy {text!r} lacks a value; write {_usage(name)}")
    return build_policy(name, values)


def is_own(text: str) -> bool:
    """Whether the text is the place of a policy of the user's own, not the name of one of ours."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name.strip() not in POLICIES


def build_policy(name: str, values: dict[str, Any]) -> Policy:
    """The policy of that name; policies in its arguments are texts, "" for none."""
    nested = values.keys() & _NESTED
    built = {key: _NESTED[key](values[key]) if values[key] else None for key in nested}
    policy: Policy = POLICIES[name](**values | built)
    return policy


def arguments_of(name: str) -> dict[str, Field[Any]]:
    """The arguments of the policy of that name."""
    if name not in POLICIES:
        raise SettingError(
            f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}; or your own, "
            "module:Class or file.py:Class"
        )
    return {field.name: field for field in fields(POLICIES[name])}


def _usage(name: str) -> str:
    separator = "; " if name in _SEMICOLONS else ","
    usage = separator.join(f"{key}=..." for key in arguments_of(name))
    return f"{name}:{usage.replace('text=...', 'TEXT')}"


def _own_policy(text: str) -> Policy:
    """The policy of `module:Class` or `file.py:Class`; see `parse_policy`."""
    place, _, rest = text.partition(":")
    name, _, arguments = rest.partition(":")
    found = _names_in(place, text).get(name)
    if not isinstance(found, type):
        raise SettingError(f"policy {text!r}: {place} has no class {name!r}; write {place}:CLASS")
    given: dict[str, Any] = {}
    for part in arguments.split(",") if arguments else []:
        key, equals, value = (one.strip() for one in part.partition("="))
        if not equals:
            raise SettingError(f"policy {text!r}: write {part.strip()!r} as KEY=VALUE")
        given[key] = _value(value)
    try:
        policy: Policy = found(**given)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"policy {text!r} cannot be built: {error}; write {place}:{name}:KEY=VALUE,... with "
            f"the arguments of {name}{inspect.signature(found)}"
        ) from error
    require_policy(policy)
    return policy


def _names_in(place: str, text: str) -> dict[str, Any]:
    """The names that a module or a file defines."""
    folder, _, file = place.replace("\\", "/").rpartition("/")
    if folder not in sys.path:  # "" is the working directory
        sys.path.insert(0, folder)
    try:
        name = file.removesuffix(".py")
        return run_path(place, run_name=name) if name != file else vars(import_module(place))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise SettingError(
            f"policy {text!r}: {error}; name a module that Python finds, or a file: FILE.py:CLASS; "
            f"or one of ours: {', '.join(POLICIES)}"
        ) from error
    except Exception as error:  # of the user's own program
        raise SettingError(
            f"policy {text!r}: {place} fails with {type(error).__name__}: {error}; correct it"
        ) from error


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_NESTED: dict[str, Callable[[str], Policy]] = {  # arguments that are policies
    "cap": parse_policy,
    "policy": parse_policy,
}
