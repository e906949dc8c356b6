"""The record of one optimizer step: what a loop returns and a log keeps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bigbatch.policies.policy import Decision
from bigbatch.statistics.noise_scale import GradientStatistics

if TYPE_CHECKING:  # torch, which takes seconds
    from bigbatch.optim.apply_gsnr import LayerGsnr


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    After a step that was not measured the host may not have read the loss yet: a first look at the
    loss, at `skipped` or at the decision then waits for the device; see docs/faults.md.

    Args:
        step: number of the step, from 1, skipped ones included.
        epoch: passes over the data that were complete.
        samples: samples consumed so far, this step's included.
        batch_size: samples of this step, over all ranks.
        target_batch_size: batch size that was decided for it, before any rounding.
        micro_batches: backwards of this step, over all ranks.
        loss: mean loss over the batch.
        lr: learning rate that was used, one per parameter group.
        statistics: None if it was not measured, or could not be (one micro-batch, a skipped step);
            `statistics.compared` says what was compared.
        skipped: True if the gradient was not finite, so that nothing was changed.
        decision: the decision on the next step.
        elapsed_seconds: time spent training so far.
        every: interval from one measured step to the next, in steps; None if none is measured.
        gsnr: GSNR of each layer if a `VarianceReduced` optimizer watches them; else None.
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
    every: int | None = 1
    gsnr: "LayerGsnr | None" = None

    @property
    def similarity(self) -> float:
        """phi of this step; nan if it was not measured."""
        return math.nan if self.statistics is None else self.statistics.similarity

    @property
    def noise_scale(self) -> float:
        """B_simple of this step in samples; nan if it was not measured."""
        return math.nan if self.statistics is None else self.statistics.noise_scale

    @classmethod
    def unread(cls, read: Callable[[], object], **known: Any) -> "StepRecord":
        """The record of a step whose loss, decision and skipping the host has not read yet.

        They are read at the first look at one of them, or by the loop at its next step.

        Args:
            read: reads the step, and calls `complete`.
            known: all other fields.
        """
        record = cls.__new__(cls)
        record.__dict__.update(known, _read=read)
        return record

    def complete(self, **values: Any) -> None:
        """Adds the fields that were read."""
        del self.__dict__["_read"]
        self.__dict__.update(values)

    if not TYPE_CHECKING:  # a checker would accept any name

        def __getattr__(self, name: str) -> Any:
            if "_read" not in self.__dict__ or name not in StepRecord.__dataclass_fields__:
                raise AttributeError(name)
            self._read()
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
