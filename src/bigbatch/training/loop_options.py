"""Keyword arguments of `AdaptiveBatch` that every integration takes too."""

import copy
from pathlib import Path
from typing import Any, TypedDict, Unpack

from bigbatch.log.run_log import RunLog
from bigbatch.policies.lr_scaling import LRScaling
from bigbatch.policies.policy import has_state
from bigbatch.setting_types import Count, Groups, Whole, checked


class LoopOptions(TypedDict, total=False):
    """`AdaptiveBatch` documents the options and their defaults."""

    batch_size: Count | None
    base_batch: Count | None
    micro_batch: Count | None
    fixed_micro_batch: bool
    min_micro_batches: Count | None
    lr_scaling: LRScaling
    transport: bool
    groups: Groups | None
    accumulate_float32_above: Whole | None
    every: Whole | None
    log: str | Path | RunLog | None


@checked
def loop_options(**options: Unpack[LoopOptions]) -> LoopOptions:
    """Checks the options before there is a loop, and returns them."""
    return options


def copy_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options for one more training by the same trainer: objects that have a state are copied."""
    return {
        name: copy.deepcopy(value) if has_state(value) and name != "log" else value
        for name, value in options.items()
    }
