"""Policies by name, as they are written on a command line."""

from dataclasses import MISSING, Field, fields
from typing import Any

from bigbatch.errors import SettingError
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.policy import Fixed, NoiseScale, NormTest, Policy, SimiGrad
from bigbatch.setting_types import parse_setting

POLICIES: dict[str, type[Any]] = {
    "fixed": Fixed,
    "simigrad": SimiGrad,
    "noise-scale": NoiseScale,
    "norm-test": NormTest,
    "schedule": Schedule,
}


def policy_named(text: str) -> Policy:
    """The policy that a text names: `NAME`, `NAME:KEY=VALUE,KEY=VALUE` or `NAME:VALUE,...`.

    A value without a key is that of the first argument. A schedule is free text with commas of its
    own; what else it needs follows a semicolon.

    Raises:
        SettingError: an unknown name or key, a value that is no number or out of range, or one is
            missing or given twice.
    Example:
        >>> policy_named("simigrad:target=0.3,max_batch=512")
        SimiGrad(target=0.3, min_batch=1, max_batch=512, grow=1.1, shrink=0.9)
        >>> policy_named("schedule:64, x2 every 2M tokens; tokens_per_sample=512").batch_size
        64
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    known = arguments_of(name)
    values: dict[str, Any] = {}
    for part in rest.split(";" if name == "schedule" else ",") if rest else []:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals and not values:
            key, value = next(iter(known)), key
        if key not in known or not value:
            raise SettingError(f"policy {text!r}: {part.strip()!r} is none of {_usage(name)}")
        if key in values:
            raise SettingError(f"policy {text!r} gives {key} twice; leave one out")
        values[key] = parse_setting(key, value, known[key].type)
    if any(field.default is MISSING and key not in values for key, field in known.items()):
        raise SettingError(f"policy {text!r} lacks a value; write {_usage(name)}")
    policy: Policy = POLICIES[name](**values)
    return policy


def arguments_of(name: str) -> dict[str, Field[Any]]:
    """The arguments of the policy of that name.

    Raises:
        SettingError: there is no such policy.
    """
    if name not in POLICIES:
        raise SettingError(f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    return {field.name: field for field in fields(POLICIES[name])}


def target_of(name: str, target: float | None) -> float | None:
    """The similarity that the policy of that name holds, of this setting; None where it has none.

    Raises:
        SettingError: there is no such policy.
    """
    return target if "target" in arguments_of(name) else None


def _usage(name: str) -> str:
    keys = list(arguments_of(name))
    if name == "schedule":
        return f"{name}:TEXT; {keys[1]}=..."
    return f"{name}:{','.join(f'{key}=...' for key in keys)}"
