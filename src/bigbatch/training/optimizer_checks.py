"""What an optimizer has to be, so that a loop can step it once for every update."""

import inspect
from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from bigbatch.errors import SettingError


def require_steppable(optimizer: Any) -> None:
    """Whether one call of `step()` is an update, and hooks tell of it.

    Raises:
        SettingError: there are several, it evaluates the model by itself, or has no hooks.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, (list, tuple, dict)):
        raise SettingError(
            f"{len(optimizer)} optimizers are given as a {name}, and one can be stepped; make one, "
            "with a parameter group and its lr for each of them"
        )
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if hooks is None:  # accelerate's, say
        raise SettingError(
            f"{name} is a wrapper that no hook can be put on; pass the optimizer inside it "
            "(optimizer.optimizer)"
        )
    if not isinstance(hooks, OrderedDict):
        raise SettingError(
            f"{name} has left torch.optim.Optimizer.__init__ out, and keeps its hooks in a "
            f"{type(hooks).__name__}; let it set _optimizer_step_post_hooks = OrderedDict()"
        )
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    needed = [one for one in arguments if one.default is one.empty]
    if any(one.kind is one.POSITIONAL_OR_KEYWORD for one in needed):
        raise SettingError(
            f"{name}.step() needs a {needed[0].name}, and an update is one step() without; use an "
            "optimizer that needs none"
        )


def ensure_step_hooks(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, whose `step()` calls hooks.

    `Optimizer.__init__` sees to that once for each class; a wrapper such as timm's Lookahead has
    left it out, and its hooks would never be called.
    """
    if not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()  # torch's own; also after unpickling
    return optimizer
