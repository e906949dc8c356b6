"""What scripts of the SimiGrad paper read from its engine, a fork of DeepSpeed's, by its names."""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams

GRADIENT_STEP_SIZE = 1
"""The scripts log it; nothing uses it, there or here."""


def readable(
    params: AdaptiveBatchParams, base_batch: int, factor: float, similarities: Mapping[int, float]
) -> Mapping[str, Any]:
    """`engine.adaptive_batch_params`, read-only.

    Args:
        params: as they were given.
        base_batch: samples that the learning rate was tuned for.
        factor: of the learning rate, in the next step.
        similarities: the last one of each batch size. The fork spells its key like this.
    """
    state = {
        "global_lr_modifier": factor,
        "original_batch_size": base_batch,
        "batch_size_similiarity_record": dict(similarities),
    }
    return MappingProxyType({**asdict(params), **state})


def cosine(similarity: float) -> Tensor:
    """`engine.cos_placeholder`: 0-dim, on the CPU; nan before the first step."""
    return torch.tensor(similarity)


def put_on(engine: Any, params: AdaptiveBatchParams) -> None:
    """The names, on an engine that does not adapt."""
    engine.adaptive_batch_params = readable(params, int(engine.train_batch_size()), 1.0, {})
    engine.cos_placeholder = cosine(float("nan"))
    engine.gradient_step_size = GRADIENT_STEP_SIZE
