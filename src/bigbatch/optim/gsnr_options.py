"""The options of variance-reduced optimizers, and the values and base optimizers they refuse."""

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch.optim import LBFGS, Optimizer

from bigbatch.errors import SettingError, StateError
from bigbatch.setting_types import Gamma, RMax, Share, argument_kinds, check_setting

Betas = tuple[Share, Share]


class VROptions(TypedDict, total=False):
    """Options that every variance-reduced optimizer adds to its base's; see `VarianceReduced`."""

    gamma: Gamma
    r_max: RMax
    beta3: Share | None
    watch: bool


def require_base(base: Optimizer, names: Iterable[str]) -> None:
    """Raises SettingError if an optimizer cannot be the base of a variance-reduced one.

    Its groups must not have settings of the given names, its `state_dict()` must have the form of
    torch's, so that p can be saved in it, and it must use one gradient per step.
    """
    name = type(base).__name__
    if isinstance(base, LBFGS):
        raise SettingError("LBFGS evaluates its closure many times a step; it has no one r")
    if shared_names := sorted(set(names) & set(base.defaults)):
        raise SettingError(
            f"{name} has {', '.join(shared_names)} of its own in its parameter groups, where "
            "VarianceReduced keeps a setting of the same name; wrap another base optimizer"
        )
    if not hasattr(base, "_optimizer_step_post_hooks"):
        raise SettingError(
            f"{name} is a wrapper that calls no hooks, and may step by other gradients than those "
            "that r scales; wrap another base optimizer"
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
    """Raises SettingError if an optimizer of this package refuses a group.

    It does so for a value that the constructor refuses, for a parameter that is in the group twice,
    of which torch only warns, and for one that is not dense and real, unless vr=False.
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


def load_into(base: Optimizer, load: Callable[[dict[str, Any]], None], state: Any) -> None:
    """Loads a state with torch's method; after an error the optimizer is as it was.

    Raises:
        StateError: the groups of the state miss settings, since it is of another optimizer.
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
