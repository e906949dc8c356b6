"""One optimizer step, from its first micro-batch to its update."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bigbatch.data.collate import Batch
from bigbatch.data.micro_batches import Cut
from bigbatch.errors import GradientError, LoopError, SettingError
from bigbatch.gradients.dtypes import to_device, widest_float, without_autocast
from bigbatch.gradients.replaced_parameters import NO_GRADIENT, has_gradient
from bigbatch.setting_types import NotNegative, setting
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.optimizer_checks import hooked
from bigbatch.training.step_record import StepRecord, StepStatistics
from bigbatch.training.update import StepContext, Update

_ZEROED = "the gradients were zeroed inside the step; leave that to step.update(), at its end"

_NO_WEIGHT = "every micro-batch of the step has weight 0"


class Step:
    """One optimizer step: iterate its micro-batches, call `backward` on each, then `update`.

    Args:
        cut: the micro-batches.
        context: shared with the other steps.
        end: decides, steps the optimizer and records.
    """

    def __init__(self, cut: Cut, context: StepContext, end: Update) -> None:
        self.ended = False
        self._cut = cut
        self._end = end
        self._meter, self._optimizer = context.meter, context.optimizer
        self._scaler, self._collectives = context.scaler, context.collectives
        self._hints, self._loss_check = context.hints, context.losses
        self._source = context.meter.source
        self._reader = context.reader
        self._reduced = None if context.reader is None else context.reader.reduced_source()
        self._micro_batches = 0  # on this rank
        self._waiting = False  # a micro-batch was given out and not called backward on
        self._present = 0  # its samples
        self._samples = 0  # of all micro-batches so far, on this rank
        self._weights: list[float] = []  # n_d of the micro-batches that count
        self._losses: list[Tensor] = []
        self._reference = 0.0  # what the weights of all ranks are expected to sum to
        self._in_samples: bool | None = None  # whether the weights are samples
        self._watch: RemovableHandle | None = None  # on the optimizer, once complete
        self._stepped = False  # by somebody else
        self._readings: Tensor | None = None  # everything the host will read, when complete
        self._values: list[float] = []  # the same, once it has
        self._message_length = 0  # numbers in a rank's message

    def __iter__(self) -> Iterator[Batch]:
        if self._waiting:
            raise LoopError("a micro-batch was given out before, and left without step.backward")
        try:
            for batch, samples in self._cut:
                self._waiting, self._present = True, samples
                self._hints.samples = samples
                self._source.reducer.set_requires_gradient_sync(
                    self._cut.last
                )  # before the forward, which reads it
                yield batch
                if self._waiting:
                    raise LoopError("a micro-batch was left without step.backward(loss)")
        except BaseException:
            self._source.reducer.set_requires_gradient_sync(
                True
            )  # for a backward of the user's own
            raise
        finally:
            self._hints.samples = 0

    @property
    def complete(self) -> bool:
        """Whether every micro-batch was run backward, so that `update` comes next."""
        return self._readings is not None

    @property
    def last(self) -> bool:
        """Whether the micro-batch that was given out is the last one on this rank."""
        return self._cut.last

    @property
    def waiting(self) -> bool:
        """Whether a micro-batch was given out whose backward is still to come."""
        return self._waiting

    @property
    def begun(self) -> bool:
        """Whether a micro-batch was given out."""
        return self._waiting or self._micro_batches > 0

    @property
    def loss(self) -> float:
        """Mean loss over the batch of all ranks; waits for the device.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
        """
        self._require_complete("loss")
        total, weights, *_ = self._wait()
        return total / weights

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Adds this micro-batch's share of the mean gradient to `.grad`.

        Args:
            loss: mean loss of the micro-batch, one number; in a half type its weight is rounded
                to that type too, so float32 is better.
            weight: what that mean is taken over, where it is not the samples (tokens, say). 0
                leaves the micro-batch and its loss out; where there are other ranks its backward
                still runs, times 0, so a gradient that is not finite skips the step.
        Raises:
            LoopError: no micro-batch is waiting for it, or weights are given to some only.
            SettingError: a weight that is negative, or no finite number.
            GradientError: somebody else wrote to `.grad`.
        """
        with self.weighted_backward(loss, weight) as factor:
            if factor or self._source.ranks > 1:  # the other ranks wait for this backward
                share = share_of(loss, factor)
                if self._scaler is not None and factor:
                    share = self._scaler.scale(share)
                share.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def weighted_backward(self, loss: Tensor, weight: float | None = None) -> Iterator[float]:
        """`backward`, for an engine that runs it itself, inside.

        Args:
            loss: as for `backward`; only its value counts.
            weight: as for `backward`.
        Returns:
            The factor of the loss, as for a gradient that is averaged over ranks; see `share_of`.
        """
        if not self._waiting:
            raise LoopError(
                "step.backward was called twice for one micro-batch, or outside `for ... in step`; "
                "sum the losses of a micro-batch and call it once"
            )
        if not isinstance(loss, Tensor):
            raise LoopError(
                f"the loss is a {type(loss).__name__}; pass the mean loss as a Tensor of one number"
            )
        if loss.numel() != 1:
            raise LoopError(f"the loss has shape {tuple(loss.shape)}; pass its mean, one number")
        self._loss_check.examine(loss, self._present, self._expected())
        in_samples = weight is None
        if self._in_samples not in (None, in_samples):
            raise LoopError("weight= is given for some micro-batches of a step and not for others")
        weight = self._present if weight is None else _number(weight)
        self._in_samples = in_samples
        self._micro_batches += 1
        self._samples += self._present
        self._expect(weight)
        try:
            with self._seen_by_reduced(weight), self._seen(weight):
                yield weight * self._source.ranks / self._reference if weight else 0.0
        except Exception as error:
            self.advise(error)
            raise
        if weight:
            self._weights.append(weight)
            self._losses.append(loss.detach() if loss.dim() == 0 else loss.detach().reshape(()))
        if self._source.micro_batches != len(self._weights):
            raise GradientError(_ZEROED)
        self._waiting, self._hints.samples = False, 0
        if self._cut.last:
            self._complete()

    def advise(self, error: BaseException) -> None:
        """Notes on an error of the present micro-batch what to do, where that is known.

        The model's forward and `backward` do so by themselves; a loss can only be watched from
        inside `for ... in step`, whose iterator an error has closed where it is seen outside.
        """
        self._hints.advise(error)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the true mean gradient of what is trained, unscaled; returns its norm before that.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
            SettingError: another norm than 2 where `.grad` holds r g already, as under DDP.
        """
        self._require_complete("clip_grad_norm_")
        if self._scaler is not None:
            with suppress(RuntimeError):  # unscaled already, by a trainer
                self._scaler.unscale_(self._optimizer)
        attached = None if self._reader is None else self._reader.attached
        if attached is None:
            norm = nn.utils.clip_grad_norm_(trained_by(self._optimizer), max_norm, norm_type)
        elif norm_type != 2:
            raise SettingError(
                f"norm_type={norm_type}: under DDP .grad of a variance-reduced optimizer is r g, "
                "and the norm that is known of g is the 2-norm; leave norm_type out"
            )
        else:
            norm = attached.clip_grad_norm_(max_norm, self._scaler)
        self._source.guard.accept_edit()
        return norm

    def update(self) -> StepRecord:
        """Decides the next batch size, steps the optimizer, and zeroes the gradients.

        A gradient that is not finite skips the step: optimizer, scheduler and policy stay.

        Raises:
            LoopError: micro-batches are missing, or it was called already.
            GradientError: a backward of your own changed `.grad` after the last micro-batch.
        """
        with self.optimizer_step() as finite:
            self.step_optimizer(finite)
        assert self._end.record is not None
        return self._end.record

    def step_optimizer(self, finite: bool) -> None:
        """What `update` does inside `optimizer_step`, for a trainer that has it in two halves.

        Args:
            finite: as `optimizer_step` says.
        """
        self._end.step_optimizer(finite)

    @contextmanager
    def optimizer_step(self) -> Iterator[bool]:
        """`update`, for an engine that steps the optimizer itself, inside.

        Returns:
            Whether the optimizer may step: the gradient is finite.
        """
        self._require_complete("update")
        if self._stepped:
            raise LoopError("optimizer.step() was called inside a step; leave it to step.update()")
        if self._source.foreign_backward:
            raise GradientError(
                "a backward of your own changed .grad between the last step.backward and "
                "step.update(); run it outside the step, or as part of the loss"
            )
        statistics = self._collect()
        zeroed = not statistics.vanishes and self._source.guard.was_zeroed()
        if zeroed or self._source.micro_batches != len(self._weights):
            raise GradientError(_ZEROED)
        assert self._watch is not None
        self._watch.remove()
        with self._end.around(statistics):
            yield statistics.finite
        self.ended = True

    def _expected(self) -> float:
        """Micro-batches of the step on this rank, if all are as large as the present one."""
        return self._cut.samples / (self._source.ranks * max(1, self._present))

    def _expect(self, weight: float) -> None:
        """What the weights of the step will add up to, the same on all ranks; corrected later."""
        if self._reference:
            return
        per_sample = 1.0 if self._in_samples else self._end.weight_per_sample
        if per_sample is None:  # the first step: alone, a rank can tell by its first micro-batch
            per_sample = 1.0 if self._source.ranks > 1 else weight / self._present
        self._reference = per_sample * self._cut.samples

    def _seen_by_reduced(self, weight: float) -> AbstractContextManager[None]:
        """An optimizer over sharded parameters reads what the micro-batches of all ranks add."""
        if self._reduced is None:
            return nullcontext()
        self._end.require_weights(given=not self._in_samples)
        total = float(self._cut.global_samples)
        if not (self._in_samples and self._cut.known):
            total = math.fsum(row[0] for row in self._collectives.gather(weight))
        return self._reduced.micro_batch(total) if total else self._reduced.idle()

    def _seen(self, weight: float) -> AbstractContextManager[None]:
        """One of weight 0 only keeps this rank in step with the others, if there are any."""
        return self._source.micro_batch(weight) if weight else self._source.idle()

    def _complete(self) -> None:
        """Gathers what is to be read, and makes `.grad` the mean if the weights differ."""
        meter = self._meter
        if self._source.ranks == 1 and not any(self._weights):
            raise LoopError(_NO_WEIGHT)
        totals = self._own_totals()
        self._readings = (
            meter.measure(self._weights, totals) if meter.due else meter.measure_grad(totals)
        )
        self._watch = hooked(self._optimizer).register_step_post_hook(self._note_step)
        total = self._total_weight()
        if total != self._reference:
            self._source.scale(self._reference / total)

    def _own_totals(self) -> Tensor:
        """[sum of weight * loss, sum of weights, micro-batches, in samples, samples, reached, ...].

        The last are the messages of all ranks: this rank's own, and zeros for the others'.
        """
        message, ranks, rank = self._end.rank_message(), self._source.ranks, self._source.rank
        self._message_length, zeros = len(message), [0.0] * len(message)
        slots = [value for each in range(ranks) for value in (message if each == rank else zeros)]
        device = self._source.parameters[0].device
        kind = widest_float(device)
        own = [math.fsum(self._weights), self._micro_batches, bool(self._in_samples), self._samples]
        counts = [*own, has_gradient(self._source), *slots]
        with without_autocast(device):
            loss = torch.zeros(1, dtype=kind, device=device)
            if self._losses:
                weights = to_device(torch.tensor(self._weights, dtype=kind), device)
                loss += weights @ to_device(torch.stack(self._losses), device, kind)
            return torch.cat([loss, to_device(torch.tensor(counts, dtype=kind), device)])

    def _total_weight(self) -> float:
        """Over all ranks; known without asking them where weights are samples."""
        if self._source.ranks == 1:
            total = math.fsum(self._weights)
        elif self._in_samples and self._cut.known:
            total = float(self._cut.samples)
        else:
            total = self._wait()[1]
        if not total:
            raise LoopError(_NO_WEIGHT)
        return total

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _wait(self) -> list[float]:
        """The one wait for the device."""
        assert self._readings is not None
        self._values = self._values or self._readings.tolist()
        return self._values

    def _collect(self) -> StepStatistics:
        """What the host needs to know of the step, the same on all ranks."""
        values, ranks = self._wait(), self._source.ranks
        loss, total, micro_batches, in_samples, samples, reached, *slots = values
        if in_samples not in (0, ranks):
            raise LoopError("weight= is given on some ranks and not on others")
        statistics, finite, vanishes = None, math.isfinite(values[-1]), values[-1] == 0
        if self._meter.due:
            totals = self._meter.totals(values)
            finite, vanishes = totals.finite, not any(totals.total_sqnorm)
            if finite and totals.micro_batches > 1:  # .grad as it was measured lacked this factor
                unit = (self._reference / total) ** 2
                statistics = self._meter.statistics(totals, unit, of_all_ranks=True)
                statistics = _of_samples(statistics, round(samples))
        if vanishes and not reached:
            raise GradientError(NO_GRADIENT)
        if not finite:  # a square may overflow by itself
            finite = all(
                all(row) for row in self._collectives.gather(self._source.guard.is_finite())
            )
        length = self._message_length
        return StepStatistics(
            samples=round(samples),
            micro_batches=round(micro_batches),
            statistics=statistics,
            loss=loss / total,
            finite=finite,
            vanishes=vanishes,
            weight_per_sample=total / samples,
            rank_messages=[slots[i * length : (i + 1) * length] for i in range(ranks)],
        )

    def _require_complete(self, call: str) -> None:
        if self.ended:
            raise LoopError(f"step.{call}() was called after step.update(), which ends the step")
        if self._readings is None:
            raise LoopError(
                f"step.{call}() was called before every micro-batch of the step was done"
            )


def _number(weight: float | Tensor) -> float:
    """The weight that a loss was given with, where that is one number."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    return float(setting("weight", weight, NotNegative))


def share_of(loss: Tensor, factor: float) -> Tensor:
    """What a micro-batch adds to the mean loss; zeros that have its graph where it adds nothing."""
    return loss * factor if factor else loss.nan_to_num(0.0, 0.0, 0.0) * 0


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_samples(statistics: GradientStatistics, samples: int) -> GradientStatistics:
    """Statistics that were measured with other weights than samples, in samples."""
    if statistics.samples == samples:
        return statistics
    factor = samples / statistics.samples
    layers = {name: _of_samples(layer, samples) for name, layer in statistics.layers.items()}
    return replace(
        statistics, grad_variance=factor * statistics.grad_variance, samples=samples, layers=layers
    )
