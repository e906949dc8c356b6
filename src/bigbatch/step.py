"""One optimizer step, from its first micro-batch to its update."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bigbatch.act.batches import StepBatches
from bigbatch.act.samples import Batch
from bigbatch.decide.policy import Decision
from bigbatch.errors import GradientError, LoopError
from bigbatch.measure.meter import GradientMeter
from bigbatch.measure.noise import GradientNoise
from bigbatch.optim.diagnostics import Factors

_ZEROED = "the gradients were zeroed inside the step; leave that to step.update(), at its end"


@dataclass(frozen=True)
class Reading:
    """What the host knows of a step's gradients: everything a decision rests on.

    Args:
        samples, micro_batches: of the step.
        noise: None where it could not be measured.
        loss: mean over the batch.
        finite: whether every gradient is.
    """

    samples: int
    micro_batches: int
    noise: GradientNoise | None
    loss: float
    finite: bool


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step was.

    Args:
        step: its number, from 1, skipped ones included.
        epoch: passes over the data completed when it ran.
        samples: samples consumed so far, this step's included.
        batch_size: samples of this step.
        target: batch size that was wanted for it, before any rounding.
        micro_batches: backwards of this step.
        loss: mean loss over the batch.
        lr: learning rate that was used, one per parameter group.
        noise: what was measured; None where it could not be (one micro-batch, a skipped step).
        skipped: True where the gradient was not finite, so that nothing was changed.
        decision: what the next step will be.
        seconds: time spent training so far.
        factors: what a watched `VarianceReduced` did to each layer; None without one.
    """

    step: int
    epoch: int
    samples: int
    batch_size: int
    target: int
    micro_batches: int
    loss: float
    lr: tuple[float, ...]
    noise: GradientNoise | None
    skipped: bool
    decision: Decision
    seconds: float
    factors: Factors | None = None

    @property
    def similarity(self) -> float:
        """phi of this step; nan where nothing was measured."""
        return math.nan if self.noise is None else self.noise.similarity

    @property
    def noise_scale(self) -> float:
        """B_simple of this step in samples; nan where nothing was measured."""
        return math.nan if self.noise is None else self.noise.noise_scale


class Step:
    """One optimizer step: iterate its micro-batches, call `backward` on each, then `update`.

    Args:
        cut: gives out the micro-batches.
        meter: reads their gradients; its source is armed inside `backward` only.
        optimizer, scaler: for clipping the gradient that the optimizer will see.
        finish: decides and steps, given what was read.
    """

    def __init__(
        self,
        cut: StepBatches,
        meter: GradientMeter,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        finish: Callable[[Reading], StepRecord],
    ) -> None:
        self.ended = False
        self._cut = cut
        self._meter = meter
        self._source = meter.source
        self._optimizer = optimizer
        self._scaler = scaler
        self._finish = finish
        self._samples = 0
        self._micro_batches = 0
        self._waiting = False  # a micro-batch was given out and not called backward on
        self._present = 0  # its samples
        self._weights: list[float] = []  # n_d of the micro-batches that count
        self._losses: list[Tensor] = []
        self._reference = 0.0  # what the weights are expected to sum to
        self._in_samples: bool | None = None  # whether the weights are samples
        self._watch: RemovableHandle | None = None  # on the optimizer, once complete
        self._stepped = False  # by somebody else
        self._readings: Tensor | None = None  # everything the host will read, when complete

    def __iter__(self) -> Iterator[Batch]:
        if self._waiting:
            raise LoopError("a micro-batch was given out before, and left without step.backward")
        for batch, samples in self._cut:
            self._waiting, self._present = True, samples
            yield batch
            if self._waiting:
                raise LoopError("a micro-batch was left without step.backward(loss)")

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Adds this micro-batch's share of the mean gradient to `.grad`.

        Args:
            loss: mean loss of the micro-batch, one number.
            weight: what that mean is taken over, where it is not the samples (tokens, say). 0
                leaves the micro-batch and its loss out.
        Raises:
            LoopError: no micro-batch is waiting for it, or weights are given to some only.
            GradientError: somebody else wrote to `.grad`.
        """
        if not self._waiting:
            raise LoopError(
                "step.backward was called twice for one micro-batch, or outside `for ... in step`; "
                "sum the losses of a micro-batch and call it once"
            )
        if loss.numel() != 1:
            raise LoopError(f"the loss has shape {tuple(loss.shape)}; pass its mean, one number")
        in_samples = weight is None
        if self._in_samples not in (None, in_samples):
            raise LoopError("weight= is given for some micro-batches of a step and not for others")
        weight = float(self._present if weight is None else weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise LoopError(f"weight={weight} must be finite and not negative")
        self._in_samples = in_samples
        self._samples += self._present
        self._micro_batches += 1
        if weight:
            self._accumulate(loss, weight)
        self._waiting = False
        if self._cut.left == 0:
            self._complete()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the true mean gradient, unscaled, and returns its norm before that.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
        """
        self._require_complete("clip_grad_norm_")
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = nn.utils.clip_grad_norm_(self._source.parameters, max_norm, norm_type)
        self._source.stamp()
        return norm

    def update(self) -> StepRecord:
        """Decides the next batch size, steps the optimizer, and zeroes the gradients.

        A gradient that is not finite skips the step: optimizer, scheduler and policy stay.

        Raises:
            LoopError: micro-batches are missing, or it was called already.
            GradientError: a backward of your own changed `.grad` after the last micro-batch.
        """
        self._require_complete("update")
        if self._stepped:
            raise LoopError("optimizer.step() was called inside a step; leave it to step.update()")
        if self._source.foreign_backward:
            raise GradientError(
                "a backward of your own changed .grad between the last step.backward and "
                "step.update(); run it outside the step, or as part of the loss"
            )
        if self._source.micro_batches != len(self._weights) or self._source.was_zeroed():
            raise GradientError(_ZEROED)
        assert self._watch is not None
        self._watch.remove()
        record = self._finish(self._read())
        self.ended = True
        return record

    def _accumulate(self, loss: Tensor, weight: float) -> None:
        if not self._weights:
            planned = self._cut.taken + self._cut.left
            self._reference = weight * planned / self._present
        share = loss * (weight / self._reference)
        if self._scaler is not None:
            share = self._scaler.scale(share)
        with self._source.micro_batch(weight):
            share.backward()  # type: ignore[no-untyped-call]
        self._weights.append(weight)
        if self._source.micro_batches != len(self._weights):
            raise GradientError(_ZEROED)
        self._losses.append(loss.detach().reshape(()))

    def _complete(self) -> None:
        """Gathers what is to be read, and makes `.grad` the mean if the weights differ."""
        total = math.fsum(self._weights)
        if not total:
            raise LoopError("every micro-batch of the step has weight 0")
        meter = self._meter
        if meter.due:
            norms = meter.measure([self._samples * weight / total for weight in self._weights])
        else:
            norms = meter.of_grad()
        losses = torch.stack(self._losses).to(norms.device, norms.dtype, non_blocking=True)
        self._readings = torch.cat([norms, losses])
        self._watch = self._optimizer.register_step_post_hook(self._note_step)
        if total != self._reference:
            self._source.scale(self._reference / total)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _read(self) -> Reading:
        """The one wait for the device."""
        assert self._readings is not None
        readings = self._readings.tolist()
        k, total = len(self._weights), math.fsum(self._weights)
        norms, losses = readings[:-k], readings[-k:]
        loss = math.fsum(w * x for w, x in zip(self._weights, losses, strict=True)) / total
        noise = None
        finite = math.isfinite(norms[0])
        if self._meter.due:
            totals = self._meter.totals(norms)
            finite = totals.finite
            if finite and k > 1:  # .grad as it was measured lacked this factor
                noise = self._meter.noise(totals, (self._reference / total) ** 2)
        finite = finite or self._source.is_finite()  # a square may overflow by itself
        return Reading(self._samples, self._micro_batches, noise, loss, finite)

    def _require_complete(self, call: str) -> None:
        if self.ended:
            raise LoopError(f"step.{call}() was called after step.update(), which ends the step")
        if self._readings is None:
            raise LoopError(
                f"step.{call}() was called before every micro-batch of the step was done"
            )
