"""What every variance-reduced optimizer takes, and which values it refuses."""

from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch.setting_types import In, NotNegative, Share, argument_kinds

Gamma = Annotated[float, In("[0, 1]", "the least factor of a step")]
RMax = Annotated[float, In("[1, inf)", "1.0 or 1 / gamma are usual")]
Factor = Literal["gsnr", "shrinkage", "positive-part"]  # the names of `rules.FACTORS`


class _Single:
    """Tensors of one number, where `In` is for numbers."""

    def __contains__(self, value: Tensor) -> bool:
        return value.numel() == 1

    def __str__(self) -> str:
        return "of one number"


Rate = NotNegative | Annotated[Tensor, _Single()]
Betas = tuple[Share, Share]


class VROptions(TypedDict, total=False):
    """Options that every variance-reduced optimizer adds to its base's; see `VarianceReduced`."""

    gamma: Gamma
    r_max: RMax
    beta3: Share | None
    factor: Factor
    watch: bool
    compiled: bool


def require_once(parameters: list[Tensor]) -> None:
    """Raises SettingError where a parameter stands twice in a list; torch only warns."""
    if len(set(parameters)) < len(parameters):
        raise SettingError("a parameter stands twice in a group; give each once")


def require_kinds(group: dict[str, Any], optimizer: type) -> None:
    """Raises SettingError where a group has a value that the optimizer's constructor refuses."""
    kinds = argument_kinds(optimizer)
    for name in kinds.keys() & group.keys():
        group[name] = kinds[name].check(name, group[name])


def require_valid(group: dict[str, Any], factor: str) -> None:
    """Raises SettingError where a parameter group has a value out of range."""
    require_once(group["params"])
    if group["gamma"] == 0 and factor == "gsnr":
        raise SettingError(
            f"gamma={group['gamma']} must be above 0 where factor is gsnr, or every step may be 0"
        )
    if group["r_max"] != 1 and factor != "gsnr":
        raise SettingError(
            f"r_max={group['r_max']} has no effect: factor={factor!r} is never above 1"
        )
    for parameter in group["params"] if group["vr"] else ():
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise SettingError(
                f"a {parameter.dtype} parameter of layout {parameter.layout} has no GSNR; give it "
                "to an optimizer of its own, or to a group with vr=False"
            )
