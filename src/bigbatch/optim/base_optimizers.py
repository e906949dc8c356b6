"""What an optimizer has to be, to be stepped along r g."""

from collections.abc import Iterable

from torch.optim import LBFGS, Optimizer

from bigbatch.errors import SettingError


def require_base(base: Optimizer, names: Iterable[str]) -> None:
    """Whether an optimizer can be the base of a variance-reduced one.

    Args:
        base: the optimizer.
        names: of the settings that VarianceReduced keeps in the parameter groups.
    Raises:
        SettingError: its groups have settings of these names, its `state_dict()` has another form
            than torch's, so that p could not be saved in it, or it needs several gradients a step.
    """
    name = type(base).__name__
    if isinstance(base, LBFGS):
        raise SettingError("LBFGS evaluates its closure many times a step; it has no one r")
    if taken := sorted(set(names) & set(base.defaults)):
        raise SettingError(
            f"{name} has {', '.join(taken)} of its own in its parameter groups, where "
            "VarianceReduced keeps a setting of the same name; wrap another base optimizer"
        )
    try:
        saved = base.state_dict().keys()
    except RuntimeError:  # of ranks that have to bring it together first
        return
    if not {"state", "param_groups"} <= saved:
        raise SettingError(
            f"{name} saves {sorted(map(str, saved))}, and p is saved under 'state', next to "
            "'param_groups', as torch's optimizers have them; pass the optimizer inside it"
        )
