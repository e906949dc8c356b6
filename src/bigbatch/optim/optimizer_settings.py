"""The settings of optimizers: their values, their learning rates, and what they refuse."""

import math
from collections.abc import Callable, Iterable
from reprlib import repr as shortened
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from bigbatch.errors import SettingError, StateError
from bigbatch.setting_types import (
    Coefficient,
    Gamma,
    Kind,
    RMax,
    Share,
    argument_kinds,
    check_setting,
)


class _OneElement:
    def __contains__(self, value: Tensor) -> bool:
        return value.numel() == 1

    def __str__(self) -> str:
        return "of one number"

    __repr__ = __str__  # in `help()`


RATE = Kind(Coefficient)
Rate = Coefficient | Annotated[Tensor, _OneElement()]
Betas = tuple[Share, Share]


class VROptions(TypedDict, total=False):
    """Options that every variance-reduced optimizer adds to its base's; see `VarianceReduced`."""

    gamma: Gamma
    r_max: RMax
    beta3: Share | None
    watch: bool


def require_base(base: Optimizer, names: Iterable[str]) -> None:
    """Raises SettingError if an optimizer cannot be the base of a variance-reduced one.

    The names are those of the settings that its groups will have.
    """
    name = type(base).__name__
    if not hasattr(base, "_optimizer_step_post_hooks"):
        raise SettingError(
            f"{name} is a wrapper that calls no hooks, and may step by other gradients than those "
            "that r scales; wrap another base optimizer"
        )
    if isinstance(base, LBFGS):
        raise SettingError("LBFGS evaluates its closure many times a step; it has no one r")
    if shared_names := sorted(set(names) & set(base.defaults)):
        raise SettingError(
            f"{name} has {', '.join(shared_names)} of its own in its parameter groups, where "
            "VarianceReduced keeps a setting of the same name; wrap another base optimizer"
        )
    try:
        keys = base.state_dict().keys()
    except RuntimeError:  # the state is scattered over ranks, which have to gather it first
        return
    if not {"state", "param_groups"} <= keys:
        raise SettingError(
            f"{name} saves {sorted(map(str, keys))}, and p is saved under 'state', next to "
            "'param_groups', as torch's optimizers have them; wrap another base optimizer"
        )


def require_valid(group: dict[str, Any], optimizer: type) -> None:
    """Raises SettingError for what an optimizer of this package refuses in a group.

    These are values that the constructor refuses, a parameter that is in the group twice, of which
    torch only warns, and one that is not dense and real, unless vr=False.
    """
    kinds = argument_kinds(optimizer)
    for name in kinds.keys() & group.keys():
        group[name] = kinds[name].check(name, group[name])
    if len(set(group["params"])) < len(group["params"]):
        raise SettingError("a parameter stands twice in a group; give each once")
    for parameter in group["params"] if check_setting("vr", group.get("vr", True), bool) else ():
        if not parameter.is_floating_point() or parameter.layout != torch.strided:
            raise SettingError(
                f"{optimizer.__name__} does not support a {parameter.dtype} parameter of layout "
                f"{parameter.layout}; put it into another optimizer"
                + (", or into a group with vr=False" if "vr" in group else "")
            )


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each parameter group; nan for a group that was built without one.

    Raises SettingError for any other value that is not a rate.
    """
    rates: list[float] = []
    for number, group in enumerate(optimizer.param_groups):
        lr: Any = group.get("lr")
        if type(lr) is float and 0 <= lr <= 1e38:  # most are, and need no closer look
            rates.append(lr)
            continue
        rate = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
        if "lr" not in group or (lr is None and optimizer.defaults.get("lr") is None):
            rate = math.nan
        elif rate not in RATE:
            name = f"the learning rate of parameter group {number}"
            raise SettingError(f"{name} was set to {shortened(lr)}; set {RATE}")
        rates.append(float(rate))
    return rates


def load_into(base: Optimizer, load: Callable[[dict[str, Any]], None], state: Any) -> None:
    """Loads a state with torch's method; after an error the optimizer is as it was.

    Raises StateError if the groups of the state miss settings, as those of other optimizers do.
    """
    before = {"state": base.state, "param_groups": base.param_groups}
    required = [base.defaults.keys() & group.keys() for group in base.param_groups]
    try:
        load(state)
        for names, group in zip(required, base.param_groups, strict=True):
            if missing := names - group.keys():
                raise StateError(
                    f"the state's groups have no {', '.join(sorted(missing))}: it is of another "
                    f"optimizer than {type(base).__name__}"
                )
    except Exception:
        vars(base).update(before)
        raise
