"""Names of the SimiGrad paper's code: `adaptive_batch_params`, and what its scripts read."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any

import torch

from bigbatch.errors import SettingError
from bigbatch.policies.controller import Controller
from bigbatch.policies.policy import SimiGrad
from bigbatch.setting_types import Count, In, Number, check_setting, checked

GRADIENT_STEP_SIZE = 1
"""The paper's scripts log it; neither its engine, a fork of DeepSpeed's, nor this one uses it."""


@checked
@dataclass(frozen=True, kw_only=True)
class AdaptiveBatchParams:
    """The keys of the paper's README.

    Args:
        enable_adjust: whether the batch adapts.
        similarity_target: target cosine between gradients of two halves of the batch, -1 to 1.
        batch_size_lower_bound, batch_size_upper_bound: bounds of the batch size in samples over
            all ranks; None for no bound.
        max_micro_batch_size: maximum samples in one backward; None for the configured micro-batch.
        verbose: 1 or True prints every decision on rank 0, 2 on every rank.
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
    def of(cls, params: Mapping[str, Any] | None) -> "AdaptiveBatchParams":
        """Reads a dictionary; None, or `enable_adjust` None, turns adaptation off.

        A number as `enable_adjust`, which the example in the README passes, counts as True.

        Raises:
            SettingError: an unknown key, or a value of another type or out of range.
        """
        values = dict(params or {})
        keys = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(keys))
        if unknown:
            raise SettingError(f"adaptive_batch_params has unknown keys {unknown}; it takes {keys}")
        switch = values.get("enable_adjust")
        check_setting("enable_adjust", switch, bool | Number | None)
        values["enable_adjust"] = switch is not None and switch is not False
        if isinstance(values.get("verbose"), bool):
            values["verbose"] = int(values["verbose"])
        return cls(**values)

    def controller(self, batch_size: int) -> Controller:
        """A controller that keeps to the paper: it decides by single steps, without averages."""
        return Controller(self._policy(), batch_size, smoothing=None)

    def _policy(self) -> SimiGrad:
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
            self._policy()  # refuses crossed bounds


def warn_of_number(params: Mapping[str, Any] | None) -> None:
    """Warns what a number as `enable_adjust` means here, and what it meant in the paper's code."""
    value = (params or {}).get("enable_adjust")
    if value is not None and not isinstance(value, bool):
        warnings.warn(
            f"enable_adjust={value!r} is a number and counts as True; the paper's code then left "
            "the learning rate unscaled, and took 0.0 as off; pass True or False",
            stacklevel=3,
        )


def fork_params(
    params: AdaptiveBatchParams, base_batch: int, factor: float, similarities: Mapping[int, float]
) -> Mapping[str, Any]:
    """`engine.adaptive_batch_params`, read-only.

    Args:
        params: the parameters that the user passed.
        base_batch: samples that the learning rate was tuned for.
        factor: factor of the learning rate in the next step.
        similarities: the last similarity of each batch size; its key is misspelled as in the fork.
    """
    state = {
        "global_lr_modifier": factor,
        "original_batch_size": base_batch,
        "batch_size_similiarity_record": dict(similarities),
    }
    return MappingProxyType({**asdict(params), **state})


def set_fork_attributes(engine: Any, params: AdaptiveBatchParams) -> None:
    """Sets the fork's attributes on an engine that does not adapt."""
    engine.adaptive_batch_params = fork_params(params, int(engine.train_batch_size()), 1.0, {})
    engine.cos_placeholder = torch.tensor(torch.nan)
    engine.gradient_step_size = GRADIENT_STEP_SIZE
