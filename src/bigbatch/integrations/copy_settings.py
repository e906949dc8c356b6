"""Settings for one more training by the same trainer."""

import copy
from typing import Any

from bigbatch.policies.controller import has_state


def copy_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings; what remembers something as a copy, so that no training continues with it.

    Args:
        settings: of `AdaptiveBatch`, by name. A `Controller`, a policy or an `lr_scaling` that has
            `state_dict` and `load_state_dict` is copied; everything else is the same object.
    Example:
        >>> from bigbatch import Controller, SimiGrad
        >>> given = {"policy": Controller(SimiGrad(0.2), batch_size=8), "base_batch": 8}
        >>> copy_settings(given)["policy"] is given["policy"]
        False
    """
    return {
        name: copy.deepcopy(value) if has_state(value) else value
        for name, value in settings.items()
    }
