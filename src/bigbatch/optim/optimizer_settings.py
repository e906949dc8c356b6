"""The settings of optimizers: their values, their learning rates, and what they refuse."""

import inspect
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


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that a composite steps; of another optimizer, itself."""
    parts = getattr(optimizer, "optimizers", None)
    if not isinstance(parts, list | tuple):
        return [optimizer]
    return [each for part in parts for each in parts_of(part)]


def name_of(optimizer: Optimizer) -> str:
    """The class of an optimizer; of a composite, those of its parts too."""
    name, parts = type(getattr(optimizer, "container", optimizer)).__name__, parts_of(optimizer)
    names = " and ".join(type(part).__name__ for part in parts)
    return name if parts == [optimizer] else f"{name} of {names}"


def required_argument(optimizer: Optimizer) -> str | None:
    """The argument without which `step()` cannot be called, if there is one."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    for parameter in parameters:
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if positional and parameter.default is parameter.empty:
            return parameter.name
    return None


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
    if any(isinstance(part, LBFGS) for part in parts_of(base)):
        raise SettingError("LBFGS evaluates its closure many times a step; it has no one r")
    own_names = {name for part in parts_of(base) for name in part.defaults}
    if shared_names := sorted(own_names.intersection(names)):
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
        if "lr" not in group or (lr is None and _has_no_rate(optimizer, group)):
            rate = math.nan
        elif rate not in RATE:
            name = f"the learning rate of parameter group {number}"
            raise SettingError(f"{name} was set to {shortened(lr)}; set {RATE}")
        rates.append(float(rate))
    return rates


def _has_no_rate(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer of a group makes its own step sizes."""
    owners = [o for o in parts_of(optimizer) if any(g is group for g in o.param_groups)]
    return all(owner.defaults.get("lr") is None for owner in owners)


def save_with_hooks(optimizer: Any, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `save` returns, with torch's hooks of `state_dict` around it."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    saved = save()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        saved = post_hook(optimizer, saved) or saved
    return saved


def load_with_hooks(optimizer: Any, load: Callable[[dict[str, Any]], None], state: Any) -> None:
    """Calls `load`, with torch's hooks of `load_state_dict` around it."""
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = pre_hook(optimizer, state) or state
    load(state)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def load_into(base: Optimizer, load: Callable[[dict[str, Any]], None], state: Any) -> None:
    """Loads a state with torch's method; after an error the optimizer is as it was.

    Raises StateError if the groups of the state miss settings, as those of other optimizers do.
    """
    before = [(part, part.state, part.param_groups) for part in parts_of(base)]
    required = [
        (part, [part.defaults.keys() & group.keys() for group in groups])
        for part, _, groups in before
    ]
    try:
        load(state)
        for part, own_names in required:
            for names, group in zip(own_names, part.param_groups, strict=True):
                if missing := names - group.keys():
                    raise StateError(
                        f"the state's groups have no {', '.join(sorted(missing))}: it is of "
                        f"another optimizer than {type(part).__name__}"
                    )
    except Exception:
        for part, own_state, groups in before:
            vars(part).update({"state": own_state, "param_groups": groups})
        raise
