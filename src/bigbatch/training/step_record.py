"""What is known of a step: before its update, and after."""

import math
from dataclasses import dataclass

from bigbatch.optim.layer_gsnr import LayerGsnr
from bigbatch.policies.policy import Decision
from bigbatch.statistics.noise_scale import GradientStatistics


@dataclass(frozen=True)
class StepStatistics:
    """What the host knows of a step's gradients: everything a decision rests on, all ranks alike.

    Args:
        samples, micro_batches: of the step, over all ranks.
        statistics: None where it could not be measured.
        loss: mean over the batch.
        finite: whether every gradient is.
        vanishes: whether every gradient is zero.
        weight_per_sample: on average.
        rank_messages: of each rank, as `Update.rank_message` has them.
    """

    samples: int
    micro_batches: int
    statistics: GradientStatistics | None
    loss: float
    finite: bool
    vanishes: bool
    weight_per_sample: float
    rank_messages: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step was.

    Args:
        step: its number, from 1, skipped ones included.
        epoch: passes over the data completed when it ran.
        samples: samples consumed so far, this step's included.
        batch_size: samples of this step, over all ranks.
        target_batch_size: batch size that was wanted for it, before any rounding.
        micro_batches: backwards of this step, over all ranks.
        loss: mean loss over the batch.
        lr: learning rate that was used, one per parameter group.
        statistics: what was measured; None where it could not be (one micro-batch, a skipped step).
        skipped: True where the gradient was not finite, so that nothing was changed.
        decision: what the next step will be.
        elapsed_seconds: time spent training so far.
        gsnr: what a watched `VarianceReduced` did to each layer; None without one.
    """

    step: int
    epoch: int
    samples: int
    batch_size: int
    target_batch_size: int
    micro_batches: int
    loss: float
    lr: tuple[float, ...]
    statistics: GradientStatistics | None
    skipped: bool
    decision: Decision
    elapsed_seconds: float
    gsnr: LayerGsnr | None = None

    @property
    def similarity(self) -> float:
        """phi of this step; nan where nothing was measured."""
        return math.nan if self.statistics is None else self.statistics.similarity

    @property
    def noise_scale(self) -> float:
        """B_simple of this step in samples; nan where nothing was measured."""
        return math.nan if self.statistics is None else self.statistics.noise_scale
