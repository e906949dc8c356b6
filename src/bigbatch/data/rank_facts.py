"""What decides a step, by name and as text, to be compared between ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# of a parameter group: what is no setting, and how torch computes the same step
_LEFT_OUT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def facts_of(named: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value of nested mappings as text.

    Example:
        >>> facts_of({"target": 64, "settings": {"every": 1}})
        {'target': '64', 'settings.every': '1'}
    """
    found: dict[str, str] = {}
    for name, value in named.items():
        if isinstance(value, Mapping):
            found |= facts_of(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else repr(value)
    return found


def optimizer_facts(optimizer: Optimizer, kind: str, *, waits: bool) -> dict[str, str]:
    """Class and settings of all parameter groups, learning rates among them.

    Args:
        optimizer: whose groups.
        kind: what it is, with what it is made of.
        waits: whether numbers on a GPU are waited for; else how often they were written to stands
            for them.
    """
    found = {"the optimizer": kind}
    for number, group in enumerate(optimizer.param_groups):
        found[f"the parameters of group {number}"] = f"{len(group['params'])} tensors"
        for name, value in group.items():
            if name not in _LEFT_OUT and (text := _text(value, waits=waits)) is not None:
                found[f"{name} of parameter group {number}"] = text
    return found


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """What differs, with both values; `first` are rank 0's."""
    for name in dict.fromkeys([*first, *other]):
        own, theirs = first.get(name, "missing"), other.get(name, "missing")
        if own != theirs:
            yield f"{name} is {theirs} there and {own} on rank 0"


def _text(value: Any, *, waits: bool) -> str | None:
    """Of what is the same in every process; None of any other object."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        read = waits or value.is_cpu
        return repr(value.item()) if read else f"a tensor, written {value._version} times"
    if isinstance(value, list | tuple):
        parts = [_text(part, waits=waits) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, float):
        return repr(float(value))  # of NumPy's too
    return repr(value) if value is None or isinstance(value, int | str) else None
