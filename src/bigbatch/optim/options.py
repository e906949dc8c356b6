"""What every variance-reduced optimizer takes, and which values it refuses."""

import math
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.optim.rules import FACTORS


class Options(TypedDict, total=False):
    """What every variance-reduced optimizer takes beside its base's own; see `VarianceReduced`."""

    gamma: float
    r_max: float
    beta3: float | None
    factor: str
    watch: bool
    compiled: bool


def require_factor(factor: str) -> None:
    """Raises SettingError where there is no such factor."""
    if factor not in FACTORS:
        raise SettingError(f"factor={factor!r} is unknown; choose one of: {', '.join(FACTORS)}")


def require_once(parameters: list[Tensor]) -> None:
    """Raises SettingError where a parameter stands twice in a list; torch only warns."""
    if len(set(parameters)) < len(parameters):
        raise SettingError("a parameter stands twice in a group; give each once")


def require_valid(group: dict[str, Any], factor: str) -> None:
    """Raises SettingError where a parameter group has a value out of range."""
    require_once(group["params"])
    gamma, r_max, beta3 = group["gamma"], group["r_max"], group["beta3"]
    if not (0 < gamma <= 1 or (gamma == 0 and factor != "gsnr")):
        raise SettingError(
            f"gamma={gamma} must lie in (0, 1]: it is the least factor of a step; 0 goes with "
            "another factor than gsnr"
        )
    if not 1 <= r_max < math.inf:
        raise SettingError(f"r_max={r_max} must be at least 1; 1.0 or 1 / gamma are usual")
    if r_max != 1 and factor != "gsnr":
        raise SettingError(f"r_max={r_max} has no effect: factor={factor!r} is never above 1")
    if beta3 is not None and not 0 <= beta3 < 1:
        raise SettingError(f"beta3={beta3} must lie in [0, 1), or be None for no momentum on r")
    for parameter in group["params"] if group["vr"] else ():
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise SettingError(
                f"a {parameter.dtype} parameter of layout {parameter.layout} has no GSNR; give it "
                "to an optimizer of its own, or to a group with vr=False"
            )


def require_free(base: Optimizer, names: Iterable[str]) -> None:
    """Raises SettingError where the base has settings of these names in its parameter groups."""
    taken = sorted(set(names) & set(base.defaults))
    if taken:
        raise SettingError(
            f"{type(base).__name__} has {', '.join(taken)} of its own in its parameter groups, "
            "where VarianceReduced keeps a setting of the same name; wrap another base optimizer"
        )
