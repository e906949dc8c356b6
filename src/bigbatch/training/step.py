"""One optimizer step, from its first micro-batch to its update."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalStep
from bigbatch.data.micro_batches import StepBatches
from bigbatch.data.rank_consistency import CHECKSUM_SUMS, are_equal, checksum_sums
from bigbatch.data.token_steps import TokenStep
from bigbatch.errors import GradientError, LoopError, SettingError
from bigbatch.gradients.dtypes import widest_float
from bigbatch.gradients.groups.group_norms import refusal_of_sums
from bigbatch.gradients.replaced_parameters import NO_GRADIENT
from bigbatch.log.step_record import StepRecord
from bigbatch.setting_types import Kind, NotNegative
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.loss_weights import label_weights, mean_over_labels, weighted_loss
from bigbatch.training.step_sums import (
    StepStatistics,
    StepSums,
    found_inf_of,
    local_totals,
    loss_sum,
)
from bigbatch.training.training_parts import trained_parameters
from bigbatch.training.update import Update

_ZEROED = (
    "the gradients were zeroed inside the step; leave that to step.update(), at its end. A "
    "backward that has failed cannot be repeated in its step: load an earlier checkpoint"
)

_NO_WEIGHT = "every micro-batch of the step has weight 0"

_MIXED = (
    "weight= is given for some micro-batches of a step, or on some ranks, and not for others: "
    "a cross entropy is weighted by its labels and any other loss by samples, which differ; pass "
    "weight= always, the number of samples if it is meant, or never"
)

_WEIGHT = Kind(NotNegative)  # once, since a weight is checked for each micro-batch


class Step:
    """One optimizer step: iterate its micro-batches, call `backward` on each, then `update`."""

    def __init__(
        self,
        micro_batches: StepBatches | TokenStep | ExternalStep,
        trained: list[Tensor],
        update: Update,
    ) -> None:
        self.ended = False  # whether `update` is done
        self._micro_batches, self._trained, self._update = micro_batches, trained, update
        self._parts, self._source = update.parts, update.parts.meter.source
        # samples, here and on all ranks, of the micro-batch whose backward is still to come
        self._pending: tuple[int, int] | None = None
        self._backwards = 0  # micro-batches done on this rank
        self._samples = 0  # of those micro-batches
        self._weights: list[float] = []  # n_d of the micro-batches that count
        self._per_sample: float | None = None  # weight of each sample so far; nan if they differ
        self._losses: list[Tensor] = []
        self._expected_weight = 0.0  # expected sum of the weights of all ranks
        # what the weights are: "samples", the "labels" of a cross entropy, or "given" as `weight=`
        self._weighting: str | None = None
        self._sums: StepSums | None = None  # once complete
        # [Note: A step that measures nothing]
        parts = self._parts
        is_read = parts.reader is not None or parts.meter.due or parts.compares
        self._is_light = not is_read and self._source.reducer.replicas == self._source.processes
        self._counts_labels = True  # unless its only backward is a mean over them
        self._summed: Callable[[], Tensor] | None = None  # what the ranks have sent, if light
        self._optimizer_steps = 0  # of the training, before the first backward
        self._elapsed_seconds = 0.0  # of the training until the last backward, on several ranks

    def __iter__(self) -> Iterator[Batch]:
        if self._pending is not None:
            raise LoopError("a micro-batch was given out before, and left without step.backward")
        hints = self._parts.oom_hints
        try:
            for batch, samples, global_samples in self._micro_batches:
                self._pending, hints.samples = (samples, global_samples), samples
                # before the forward, which reads it
                self._source.reducer.set_requires_gradient_sync(self._micro_batches.last)
                yield batch
                if self._pending is not None:
                    raise LoopError("a micro-batch was left without step.backward(loss)")
        except BaseException:  # a backward of the user's own may follow
            self._source.reducer.set_requires_gradient_sync(True)
            raise
        finally:
            hints.samples = 0

    @property
    def complete(self) -> bool:
        """Whether every micro-batch was run backward, so that `update` comes next."""
        return self._sums is not None

    @property
    def last(self) -> bool:
        """Whether the present micro-batch is the last one on this rank."""
        return self._micro_batches.last

    @property
    def begun(self) -> bool:
        """Whether a micro-batch was given out."""
        return self._pending is not None or self._backwards > 0

    @property
    def waiting(self) -> bool:
        """Whether a micro-batch was given out whose backward is still to come."""
        return self._pending is not None

    @property
    def loss(self) -> float:
        """Mean loss over the batch of all ranks; waits for the device.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
        """
        loss_sum, weight_sum, *_ = self._require_complete("loss").read()
        return loss_sum / weight_sum if weight_sum else math.nan  # no label counts

    @property
    def samples(self) -> int:
        """Samples of the batch of all ranks; waits for the device.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
        """
        return round(self._require_complete("samples").read()[4])

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Adds this micro-batch's share of the mean gradient to `.grad`.

        Args:
            loss: mean loss of the micro-batch, one number; in a half type its weight is rounded
                to that type too, so float32 is better.
            weight: number of elements that the mean is over, if these are not samples (tokens, for
                example); or a tensor with that number for each sample, (samples,), which `groups`
                need. 0 leaves the micro-batch and its loss out; on several ranks its backward still
                runs, times 0, so a gradient that is not finite skips the step. Default: what the
                graph of the loss says for a mean cross entropy (its labels that are not ignored,
                times class weights), else samples.
        Raises:
            LoopError: no micro-batch waits for its backward, or only some have weights.
            SettingError: a weight that is negative, not a finite number, or of another shape.
            GradientError: `.grad` was written to by other code.
        """
        number, factor = self._begin(loss, loss, weight)
        engine = self._source.engine
        try:
            with self._micro_batch(number):
                # the other ranks, or an engine, wait for this backward
                if factor or engine is not None or self._source.ranks > 1:
                    weighted, scaler = weighted_loss(loss, factor), self._parts.scaler
                    if scaler is not None and factor:
                        weighted = scaler.scale(weighted)
                    if engine is None:
                        weighted.backward()  # type: ignore[no-untyped-call]
                    else:
                        engine.backward(weighted)
        except Exception as error:
            self.advise(error)
            raise
        self._end()

    @contextmanager
    def weighted_backward(
        self, loss: Tensor, weight: float | Tensor | None = None, *, root: Tensor | None = None
    ) -> Iterator[float]:
        """`backward` for an engine that runs the backward itself, inside the block.

        Gives the factor of the loss for a gradient that is averaged over ranks; see
        `weighted_loss`. The backward starts from `root`, by default the loss.
        """
        number, factor = self._begin(loss, loss if root is None else root, weight)
        try:
            with self._micro_batch(number):
                yield factor
        except Exception as error:
            self.advise(error)
            raise
        self._end()

    def _begin(
        self, loss: Tensor, root: Tensor, weight: float | Tensor | None
    ) -> tuple[float, float]:
        """Counts the micro-batch whose backward comes now; its n_d, and the factor of its loss."""
        if self._pending is None:
            raise LoopError(
                "step.backward was called twice for one micro-batch, or outside `for ... in step`; "
                "sum the losses of a micro-batch and call it once"
            )
        if not isinstance(loss, Tensor):
            raise LoopError(
                f"the loss is a {type(loss).__name__}; pass the mean loss as a Tensor of one number"
            )
        if loss.ndim and loss.numel() != 1:
            raise LoopError(f"the loss has shape {tuple(loss.shape)}; pass its mean, one number")
        samples, _ = self._pending
        number, sample_weights = self._weigh(loss, root, weight, samples)
        if number and self._parts.meter.groups is not None and self._counts_labels:
            self._prepare_groups(root, samples, sample_weights)
        if not self._backwards:
            self._optimizer_steps = self._parts.optimizer_steps
        self._backwards += 1
        self._samples += samples
        each = number / samples
        self._per_sample = each if self._per_sample in (None, each) else math.nan
        if not self._counts_labels:
            self._expected_weight = number
        elif not self._expected_weight:
            self._expect_weight(number, samples)
        if number:
            self._weights.append(number)
            self._losses.append(loss.detach() if loss.ndim == 0 else loss.detach().reshape(()))
        if self._source.processes > 1 and self._micro_batches.last:
            self._elapsed_seconds = self._update.past.elapsed_seconds
            if self._is_light:  # what the ranks sum is known
                own = local_totals(self._source, self._losses, self._weights, self._counts())
                self._summed = self._source.reducer.start_all_reduce(own)
        # a micro-batch of weight 0 only keeps this rank in step with the others
        return number, number and number * self._source.ranks / self._expected_weight

    def _end(self) -> None:
        if self._source.micro_batches != len(self._weights):
            raise GradientError(_ZEROED)
        self._pending, self._parts.oom_hints.samples = None, 0
        if self._micro_batches.last:
            self._complete()

    def _weigh(
        self, loss: Tensor, root: Tensor, weight: float | Tensor | None, samples: int
    ) -> tuple[float, float | Tensor | None]:
        """n_d of a micro-batch, and the weights of its samples if they differ."""
        labels, weighting, packed = None, "given", self._update.packed
        if weight is None:
            is_only = self._source.ranks == 1 and self._micro_batches.last and not self._backwards
            if self._is_light and is_only:  # the mean of one backward is the step's
                self._counts_labels = mean_over_labels(root, 0 if packed else samples) is None
            else:
                labels = label_weights(root, samples, packed=packed)
            weighting = "samples" if labels is None and self._counts_labels else "labels"
        if weighting in self._parts.loss_check.examined:
            # micro-batches of the step on this rank, if all are as large as this one
            accumulation = self._micro_batches.samples / (self._source.ranks * max(1, samples))
            self._parts.loss_check.examine(loss, samples, accumulation, weighting)
        if self._weighting not in (None, weighting):
            if "given" in (weighting, self._weighting):
                raise LoopError(_MIXED)
            labels = self._even_weights(labels, samples)
        self._weighting = self._weighting or weighting
        if weight is not None:
            if isinstance(weight, Tensor):
                weight = weight.detach().cpu()  # one wait for the device
            return _as_number(weight, samples), weight
        if labels is None:
            return samples, None
        labels = labels.detach().cpu()  # one wait for the device
        number = math.fsum(labels.tolist())
        # no label of the step counts: its loss is nan, as in any loop, and it is skipped; other
        # ranks may have labels, see `_correct_weight`
        is_lost = self._source.ranks == 1 and self._micro_batches.last and not self._weights
        return (samples, None) if is_lost and not number else (number, labels)

    def _even_weights(self, labels: Tensor | None, samples: int) -> Tensor | None:
        """The weights of a micro-batch in a step of the other kind, where all samples have one.

        So an auxiliary loss may be added in some micro-batches, or another task take its turn.
        """
        if labels is not None:
            if len(labels) == samples and labels.min() == labels.max() > 0:
                return None
        elif self._per_sample is not None and self._per_sample > 0:
            return torch.full((samples,), self._per_sample, dtype=torch.float64)
        raise LoopError(_MIXED)

    def _prepare_groups(self, root: Tensor, samples: int, weight: float | Tensor | None) -> None:
        """Tells the source whose groups the backward is of."""
        if root.grad_fn is None:  # torch refuses its backward
            return
        if weight is not None and (not isinstance(weight, Tensor) or weight.shape != (samples,)):
            raise SettingError(
                f"groups={self._parts.meter.groups} needs the weight of each sample: pass weight= "
                f"as a tensor of {samples} numbers, (labels != -100).sum(1) for example"
            )
        self._source.prepare_groups([root], samples, weight)

    def advise(self, error: BaseException) -> None:
        """Adds a remedy to an error of the present micro-batch, if one is known.

        The model's forward and `backward` call this themselves. For an error of the loss, call it
        inside `for ... in step`: outside, the iterator is closed and the micro-batch unknown.
        """
        self._parts.oom_hints.advise(error)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the unscaled mean gradient of the trained parameters; returns its norm before that.

        DeepSpeed clips at this norm as it steps, and leaves its own `gradient_clipping` out.

        Raises:
            LoopError: before the last micro-batch's backward, or after `update()`.
        """
        self._require_complete("clip_grad_norm_")
        if (engine := self._source.engine) is not None:
            return engine.clip_grad_norm_(max_norm)
        optimizer, scaler = self._parts.optimizer, self._parts.scaler
        if scaler is not None:
            with suppress(RuntimeError):  # unscaled already, by a trainer
                scaler.unscale_(optimizer)
        reader = self._parts.reader
        attached = None if reader is None else reader.attached
        if attached is None:
            norm = self._source.clip_grad_norm_(trained_parameters(optimizer), max_norm)
        else:
            norm = attached.clip_grad_norm_(max_norm, scaler)
        self._source.guard.accept_edit()
        return norm

    def update(self) -> StepRecord:
        """Decides the next batch size, steps the optimizer, and zeroes the gradients.

        A gradient that is not finite skips the step: optimizer, scheduler and policy stay.

        Raises:
            LoopError: micro-batches are missing, or it was called already.
            GradientError: a backward of your own changed `.grad` after the last micro-batch.
        """
        sums = self._require_complete("update")
        is_weighed = not self._counts_labels or self._weighting != "labels"
        if sums.found_inf is not None and is_weighed and self._update.can_wait:
            self._end_unread(sums)
        else:
            statistics = self._statistics(sums)
            self._require_untouched(vanishes=statistics.vanishes)
            with self._update.end_step(statistics):
                self.step_optimizer(statistics.finite)
        self.ended = True
        record = self._update.past.record
        assert record is not None
        return record

    @contextmanager
    def optimizer_step(self) -> Iterator[bool]:
        """`update` for an engine that steps the optimizer itself, inside the block.

        Gives whether it may step: the gradient is finite.
        """
        statistics = self._statistics(self._require_complete("update"))
        self._require_untouched(vanishes=statistics.vanishes)
        with self._update.end_step(statistics):
            yield statistics.finite
        self.ended = True

    def _end_unread(self, sums: StepSums) -> None:
        """Ends a step that the optimizer skips on the device if its gradient is not finite."""
        self._require_untouched(vanishes=False)
        stepping: list[Any] = self._parts.stepping
        *_, previous_seconds, elapsed_seconds = sums.counts
        known = StepStatistics(self._samples, self._backwards, elapsed_seconds, previous_seconds)
        with self._update.end_step(known, lambda: self._statistics(sums)):
            for part in stepping:
                part.found_inf = sums.found_inf
            try:
                self._parts.optimizer.step()
            finally:
                for part in stepping:
                    del part.found_inf

    def _require_untouched(self, *, vanishes: bool) -> None:
        """Raises an error if anybody else has stepped the optimizer, or written to `.grad`."""
        if self._optimizer_steps != self._parts.optimizer_steps:
            raise LoopError("optimizer.step() was called inside a step; leave it to step.update()")
        if self._source.foreign_backward:
            raise GradientError(
                "a backward of your own changed .grad between the last step.backward and "
                "step.update(); run it outside the step, or as part of the loss"
            )
        if self._parts.scaler is not None and self._parts.has_unscaled_part:
            raise LoopError(
                "scaler.unscale_() was called for one of several optimizers, and the step would "
                "unscale its gradients again; call scaler.unscale_(train.optimizer)"
            )
        zeroed = not vanishes and self._source.guard.was_zeroed()
        if zeroed or self._source.micro_batches != len(self._weights):
            raise GradientError(_ZEROED)

    def step_optimizer(self, finite: bool) -> None:
        """Steps the optimizer inside `optimizer_step`; if not finite, updates the scaler only."""
        optimizer, scaler = self._parts.optimizer, self._parts.scaler
        if (engine := self._source.engine) is not None:
            engine.step(self.samples, finite=finite)
        elif scaler is None:
            if finite:
                optimizer.step()
        else:
            if finite:
                scaler.step(optimizer)
            else:
                with suppress(RuntimeError):  # unscaled already, by clipping
                    scaler.unscale_(optimizer)
            scaler.update()

    def _expect_weight(self, weight: float, samples: int) -> None:
        """Expects a sum of the step's weights, the same on all ranks; `_complete` corrects it."""
        self._update.settle()  # for the weights of the last step
        per_sample = 1.0 if self._weighting == "samples" else self._update.past.weight_per_sample
        if not per_sample:  # the first step: ranks may begin with different weights
            (total,) = self._parts.collectives.sum(weight / samples)
            per_sample = total / self._source.processes or 1.0
        self._expected_weight = per_sample * self._micro_batches.samples

    def _micro_batch(self, weight: float) -> AbstractContextManager[None]:
        """Inside runs the backward of the present micro-batch."""
        own = self._source.micro_batch(weight) if weight else self._source.idle()
        return own if self._parts.reduced is None else self._reduced_too(own, weight)

    @contextmanager
    def _reduced_too(self, own: AbstractContextManager[None], weight: float) -> Iterator[None]:
        """For an optimizer over sharded parameters, which reads sums over the ranks' backwards."""
        reduced = self._parts.reduced
        assert reduced is not None
        assert self._pending is not None
        self._update.require_same_weighting(self._weighting_code)
        total = float(self._pending[1])
        if not (self._weighting == "samples" and self._micro_batches.samples_known):
            (total,) = self._parts.collectives.sum(weight)
        with reduced.micro_batch(total) if total else reduced.idle(), own:
            yield

    @property
    def _weighting_code(self) -> int:
        """A number whose sum over the ranks shows whether all have the same weighting."""
        codes = {"given": 0, "samples": 1, "labels": 1 + self._source.ranks}
        return codes[self._weighting or "given"]

    def _complete(self) -> None:
        """Sums over the ranks what the host will read; corrects `.grad` if the weights differ."""
        parts, losses = self._parts, self._losses
        if self._source.ranks == 1 and not losses:
            raise LoopError(_NO_WEIGHT)
        trained = trained_parameters(parts.optimizer)
        same = [*map(id, trained)] == [*map(id, self._trained)]
        if not same and (late := set(trained) - set(self._trained)):
            raise GradientError(
                f"{len(late)} parameters were added to the optimizer after the step began, and "
                "their gradients lack a part of it; add them between two steps, after step.update()"
            )
        found_inf, pair_sums = None, self._compare_steps()
        if self._is_light and self._source.ranks == 1 and parts.skips_on_device:
            found_inf = found_inf_of(self._source, None if self._counts_labels else losses[0])
        self._sums = StepSums(
            parts.meter,
            losses,
            self._weights,
            [] if self._summed else self._counts(),
            is_light=self._is_light,
            summed=self._summed,
            found_inf=found_inf,
            pair_sums=pair_sums,
        )
        if self._counts_labels:
            self._correct_weight(self._sums)

    def _counts(self) -> list[float]:
        """What this rank knows of the step; see `StepSums`."""
        is_shared, past = self._source.processes > 1, self._update.past
        return [
            math.fsum(self._weights),
            self._backwards,
            is_shared and self._weighting_code,
            self._samples,
            is_shared and bool(self._source.local_grads()),  # one process looks if it must
            past.step_seconds,
            self._elapsed_seconds or past.elapsed_seconds,
            *(checksum_sums(self._update.checksum()) if is_shared else ()),
        ]

    def _correct_weight(self, sums: StepSums) -> None:
        """Corrects `.grad` where the sum of the weights is not the expected one."""
        total = math.fsum(self._weights)
        if self._source.ranks > 1:  # over all of them; needs no wait if the weights are samples
            is_known = self._weighting == "samples" and self._micro_batches.samples_known
            total = self._micro_batches.samples if is_known else sums.read()[1]
        if not total and self._weighting != "labels":
            raise LoopError(_NO_WEIGHT)
        if total not in (0, self._expected_weight):
            self._source.scale(self._expected_weight / total)

    def _compare_steps(self) -> Tensor | None:
        """Sums over this step and the one before; None if they are not compared."""
        pairs, source, scaler = self._parts.pairs, self._source, self._parts.scaler
        if pairs is None:
            return None
        if not self._parts.compares or len(self._weights) != 1:
            pairs.forget()
            return None
        scale: float | Tensor = self._weights[0] / self._expected_weight
        if scaler is not None:
            device = source.parameters[0].device
            scale = scaler.scale(torch.tensor(scale, dtype=widest_float(device), device=device))
        gradients = [source.local_grad(p) for p in source.parameters]
        return pairs.add(source.parameters, gradients, self._weights[0], scale)

    def _statistics(self, sums: StepSums) -> StepStatistics:
        """The step's statistics, the same on all ranks."""
        ranks, processes, meter = self._source.ranks, self._source.processes, self._parts.meter
        loss, weight, micro_batches, weighting, total, has_grad, *rest = sums.read()
        previous_seconds, elapsed_seconds, *more = rest
        of_checksums, losses_differ = more[:CHECKSUM_SUMS], more[CHECKSUM_SUMS:]
        if weighting not in (0, ranks, ranks * (1 + ranks)):  # equal on all ranks
            raise LoopError(_MIXED)
        if any(losses_differ):
            self._parts.collectives.require_same_losses(loss_sum(self._weights, self._losses))
        statistics = None
        if self._is_light:
            checks = sums.values[sums.head :]
            finite, vanishes = all(map(math.isfinite, checks)), not any(checks)
            if sums.found_inf is not None:
                finite, vanishes = vanishes, False
        elif not meter.due:
            *own, sqnorm = sums.values[sums.head :]  # of a pair, or of the groups
            finite, vanishes = math.isfinite(sqnorm), sqnorm == 0
            if self._parts.pairs is not None and own:
                pair = self._parts.pairs.statistics(own)
                is_known = math.isfinite(pair.grad_sqnorm + pair.grad_variance)
                statistics = _in_samples(pair, round(total)) if is_known else None
            if self._source.group_tap is not None:
                self._source.refuse_groups(refusal_of_sums(own[-1]))
        else:
            totals = meter.totals(sums.values)
            finite, vanishes = totals.is_finite, not any(totals.grad_sqnorms)
            if finite and totals.micro_batches > 1:  # .grad as it was measured lacked this factor
                unit = (self._expected_weight / weight) ** 2
                statistics = meter.statistics(totals, unit, of_all_ranks=True)
                statistics = _in_samples(statistics, round(total))
        if vanishes and not (has_grad or self._source.local_grads()):
            raise GradientError(NO_GRADIENT)
        if self._weighting == "labels" and (not weight or math.isnan(loss)):  # no label counts
            finite, vanishes = False, True
        elif not finite and sums.found_inf is None:  # a square or a norm may overflow by itself
            (failed,) = self._parts.collectives.sum(not self._source.guard.is_finite())
            finite = not failed
        return StepStatistics(
            samples=round(total),
            micro_batches=round(micro_batches),
            statistics=statistics,
            loss=loss / weight if weight else math.nan,
            finite=finite,
            vanishes=vanishes,
            weight_per_sample=weight / total if self._counts_labels else None,
            elapsed_seconds=elapsed_seconds / ranks,
            previous_seconds=previous_seconds / ranks,
            ranks_agree=are_equal(of_checksums, processes),
        )

    def _require_complete(self, call: str) -> StepSums:
        if self.ended:
            raise LoopError(f"step.{call}() was called after step.update(), which ends the step")
        if self._sums is None:
            raise LoopError(
                f"step.{call}() was called before every micro-batch of the step was done"
            )
        return self._sums


def _as_number(weight: float | Tensor, samples: int) -> float:
    """The weight of a loss as a number, checked; that of samples is their sum."""
    if not isinstance(weight, Tensor) or weight.numel() == 1:
        number = weight.item() if isinstance(weight, Tensor) else weight
        return float(_WEIGHT.check("weight", number))
    if weight.shape != (samples,):
        raise SettingError(
            f"weight= has shape {tuple(weight.shape)}; pass one number, or a tensor of {samples} "
            "numbers, one for each sample of the micro-batch"
        )
    if not bool(((weight >= 0) & (weight < math.inf)).all()):
        raise SettingError(f"weight={weight!r} must be numbers in [0, inf)")
    return math.fsum(weight.tolist())


def _in_samples(statistics: GradientStatistics, samples: int) -> GradientStatistics:
    """Statistics measured with other weights, converted to samples."""
    if statistics.samples == samples:
        return statistics
    factor = samples / statistics.samples
    layers = {name: _in_samples(layer, samples) for name, layer in statistics.layers.items()}
    return replace(
        statistics, grad_variance=factor * statistics.grad_variance, samples=samples, layers=layers
    )
