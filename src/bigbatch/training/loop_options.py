"""Keyword arguments of `AdaptiveBatch` that every integration takes too."""

import copy
from typing import Any, TypedDict, Unpack

from bigbatch.policies.controller import has_state
from bigbatch.policies.plan_constraints import MinMicroBatches
from bigbatch.setting_types import Count, checked
from bigbatch.training.lr_scaling import LRScaling


class LoopOptions(TypedDict, total=False):
    """What they mean, and their defaults: `AdaptiveBatch`."""

    batch_size: Count | None
    base_batch: Count | None
    micro_batch: Count | None
    fixed_micro_batch: bool
    min_micro_batches: MinMicroBatches | None
    lr_scaling: LRScaling


@checked
def loop_options(**options: Unpack[LoopOptions]) -> LoopOptions:
    """The options, checked before there is a loop.

    Raises:
        SettingError: an unknown option, or a value of another type or range.
    """
    return options


def copy_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same for one more training by the same trainer: what has a state is a copy.

    Args:
        options: of `AdaptiveBatch`, by name. A `Controller`, a policy or an `lr_scaling` that has
            `state_dict` and `load_state_dict` is copied; everything else is the same object.
    Example:
        >>> from bigbatch import Controller, SimiGrad
        >>> options = {"policy": Controller(SimiGrad(0.2), batch_size=8), "base_batch": 8}
        >>> copy_options(options)["policy"] is options["policy"]
        False
    """
    return {
        name: copy.deepcopy(value) if has_state(value) else value for name, value in options.items()
    }
