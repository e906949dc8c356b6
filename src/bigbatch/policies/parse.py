"""Policies by name, as a command line has them."""

from dataclasses import MISSING, Field, fields
from typing import Any

from bigbatch.errors import SettingError
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.goodput import Goodput
from bigbatch.policies.policy import Fixed, NoiseScale, NormTest, Policy, SimiGrad
from bigbatch.setting_types import parse_setting

POLICIES: dict[str, type[Any]] = {
    "fixed": Fixed,
    "simigrad": SimiGrad,
    "noise-scale": NoiseScale,
    "norm-test": NormTest,
    "goodput": Goodput,
    "schedule": Schedule,
}


def parse_policy(text: str) -> Policy:
    """Parses a policy: `NAME`, `NAME:KEY=VALUE,KEY=VALUE` or `NAME:VALUE,...`.

    A value without a key is the first argument's. The text of a schedule contains commas; its other
    arguments follow a semicolon.

    Raises:
        SettingError: the name or a key is unknown, or a value is missing, out of range, not of its
            argument's type, or given twice.
    Example:
        >>> parse_policy("simigrad:target=0.3,max_batch=512")
        SimiGrad(target=0.3, min_batch=1, max_batch=512, grow=1.1, shrink=0.9)
        >>> parse_policy("schedule:64, x2 every 2M tokens; tokens_per_sample=512").batch_size
        64
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    arguments = arguments_of(name)
    values: dict[str, Any] = {}
    for part in rest.split(";" if name == "schedule" else ",") if rest else []:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals and not values:
            key, value = next(iter(arguments)), key
        if key not in arguments or not value:
            raise SettingError(f"policy {text!r}: {part.strip()!r} is none of {_usage(name)}")
        if key in values:
            raise SettingError(f"policy {text!r} gives {key} twice; leave one out")
        values[key] = parse_setting(key, value, arguments[key].type)
    if any(field.default is MISSING and key not in values for key, field in arguments.items()):
        raise SettingError(f"policy {text!r} lacks a value; write {_usage(name)}")
    policy: Policy = POLICIES[name](**values)
    return policy


def arguments_of(name: str) -> dict[str, Field[Any]]:
    """The arguments of the policy of that name.

    Raises:
        SettingError: no policy has that name.
    """
    if name not in POLICIES:
        raise SettingError(f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    return {field.name: field for field in fields(POLICIES[name])}


def target_of(name: str, target: float | None) -> float | None:
    """`target`, if the policy of that name has a target similarity; else None.

    Raises:
        SettingError: no policy has that name.
    """
    return target if "target" in arguments_of(name) else None


def _usage(name: str) -> str:
    keys = list(arguments_of(name))
    if name == "schedule":
        return f"{name}:TEXT; {keys[1]}=..."
    return f"{name}:{','.join(f'{key}=...' for key in keys)}"
