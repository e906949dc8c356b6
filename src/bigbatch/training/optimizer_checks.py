"""Checks of an optimizer that a loop steps once per update."""

import inspect
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError


def require_steppable(optimizer: Any) -> None:
    """Raises SettingError unless one call of `step()` is an update, and calls hooks."""
    name = type(optimizer).__name__
    if isinstance(optimizer, (list, tuple, dict)):
        raise SettingError(
            f"{len(optimizer)} optimizers are given as a {name}, and one can be stepped; make one, "
            "with a parameter group and its lr for each of them"
        )
    if not isinstance(getattr(optimizer, "_optimizer_step_post_hooks", None), OrderedDict):
        raise SettingError(
            f"{name} is a wrapper that no hook can be put on, and the optimizer inside it alone "
            "would lose what it adds (privacy, commits, averages); use it in a loop of your own, "
            "which a GradientMeter can measure. For one that accelerate prepared, use "
            "bigbatch.integrations.accelerate.adaptive_batch, or pass the optimizer inside it"
        )
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    for parameter in parameters:
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if positional and parameter.default is parameter.empty:
            raise SettingError(
                f"{name}.step() needs a {parameter.name}, and an update is one step() without; use "
                "an optimizer that needs none"
            )


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
