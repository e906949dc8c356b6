"""The learning rates of an optimizer: which numbers they may be, and what they are."""

import math
from reprlib import repr as shortened
from typing import Annotated, Any

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.setting_types import Coefficient, Kind


class _OneElement:
    """The tensors of one element, as `In` is the numbers of an interval."""

    def __contains__(self, value: Tensor) -> bool:
        return value.numel() == 1

    def __str__(self) -> str:
        return "of one number"

    __repr__ = __str__  # in `help()`


RATE = Kind(Coefficient)
Rate = Coefficient | Annotated[Tensor, _OneElement()]


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each parameter group; nan for a group that was built without one.

    Raises:
        SettingError: a rate was set to anything but such a number.
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
