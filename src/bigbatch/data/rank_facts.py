"""What decides a step, by name and as text, to be compared between ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# keys of a parameter group that are no setting, or choose how torch computes the same step
_IGNORED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def facts_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value of nested mappings as text.

    Example:
        >>> facts_of({"target": 64, "settings": {"every": 1}})
        {'target': '64', 'settings.every': '1'}
    """
    facts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            facts |= facts_of(value, f"{prefix}{name}.")
        else:
            facts[f"{prefix}{name}"] = value if isinstance(value, str) else repr(value)
    return facts


def optimizer_facts(optimizer: Optimizer, description: str, *, waits: bool) -> dict[str, str]:
    """Class and settings of all parameter groups, learning rates among them.

    Args:
        optimizer: the optimizer that has the groups.
        description: its class, and what it consists of.
        waits: whether to wait for numbers on a GPU; if not, their number of writes stands for
            them.
    """
    facts = {"the optimizer": description}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the parameters of group {number}"] = f"{len(group['params'])} tensors"
        for name, value in group.items():
            if name not in _IGNORED and (text := _text(value, waits=waits)) is not None:
                facts[f"{name} of parameter group {number}"] = text
    return facts


def differences(rank0: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """A text for each fact that differs, with both values."""
    for name in dict.fromkeys([*rank0, *other]):
        expected, value = rank0.get(name, "missing"), other.get(name, "missing")
        if expected != value:
            yield f"{name} is {value} there and {expected} on rank 0"


def _text(value: Any, *, waits: bool) -> str | None:
    """A value as text if it is the same in every process; None for any other object."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        readable = waits or value.is_cpu
        return repr(value.item()) if readable else f"a tensor, written {value._version} times"
    if isinstance(value, list | tuple):
        texts = [_text(item, waits=waits) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, float):
        return repr(float(value))  # a NumPy float too
    return repr(value) if value is None or isinstance(value, int | str) else None
