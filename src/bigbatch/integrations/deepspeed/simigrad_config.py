"""What the paper's code took as `adaptive_batch_params`, with types checked."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from bigbatch.errors import SettingError
from bigbatch.policies.policy import SimiGrad
from bigbatch.setting_types import Count, In, Number, check_setting, checked


@checked
@dataclass(frozen=True, kw_only=True)
class AdaptiveBatchParams:
    """The keys of the paper's README.

    Args:
        enable_adjust: whether the batch adapts.
        similarity_target: of the gradients of two halves of the batch, from -1 to 1.
        batch_size_lower_bound, batch_size_upper_bound: in samples over all ranks; None for none.
        max_micro_batch_size: most samples in one backward; None for the configured micro-batch.
        verbose: 1 or True says every decision on rank 0, 2 on every rank.
    Source:
        github.com/HeyangQin/SimiGrad, README.
    """

    enable_adjust: bool = False
    similarity_target: Annotated[float, In("[-1, 1]")] | None = None
    batch_size_lower_bound: Count | None = None
    batch_size_upper_bound: Count | None = None
    max_micro_batch_size: Count | None = None
    verbose: Annotated[int, In("[0, 2]")] = 0

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> "AdaptiveBatchParams":
        """From a dictionary; None, or `enable_adjust` None, is off.

        A number as `enable_adjust`, which the README's own example passes, counts as True.

        Raises:
            SettingError: an unknown key, or a value of another type or out of range.
        """
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise SettingError(
                f"adaptive_batch_params has unknown keys {unknown}; it takes {known}"
            )
        given["enable_adjust"] = _switch(given.get("enable_adjust"))
        if isinstance(given.get("verbose"), bool):
            given["verbose"] = int(given["verbose"])
        return cls(**given)

    def policy(self) -> SimiGrad:
        """What decides by them."""
        assert self.similarity_target is not None
        return SimiGrad(
            float(self.similarity_target),
            min_batch=self.batch_size_lower_bound or 1,
            max_batch=self.batch_size_upper_bound,
        )

    def __post_init__(self) -> None:
        if self.enable_adjust:
            if self.similarity_target is None:
                raise SettingError("enable_adjust needs a similarity_target, a number from -1 to 1")
            self.policy()  # refuses crossed bounds


def _switch(value: Any) -> bool:
    check_setting("enable_adjust", value, bool | Number | None)
    return value is not None and value is not False


def warn_of_number(given: Mapping[str, Any] | None) -> None:
    """Says what a number as `enable_adjust` means here, and what it meant in the paper's code."""
    value = (given or {}).get("enable_adjust")
    if value is not None and not isinstance(value, bool):
        warnings.warn(
            f"enable_adjust={value!r} is a number and counts as True; the paper's code then left "
            "the learning rate unscaled, and took 0.0 as off; pass True or False",
            stacklevel=3,
        )
