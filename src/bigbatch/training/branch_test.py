"""Branches of a training at several batch sizes, from one state: the critical batch size."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean

import torch
from torch import Tensor, nn

from bigbatch.data.batches import Batches
from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rng_state import seed_torch
from bigbatch.data.sample_buffer import SampleBuffer
from bigbatch.errors import BatchError, LoopError, SettingError
from bigbatch.statistics.critical_batch import BranchCurve, critical_batch
from bigbatch.training.branch_plan import BranchPlan, BranchRequest, averaging_steps
from bigbatch.training.loss_check import one_number
from bigbatch.training.loss_weights import label_weights, weighted_loss
from bigbatch.training.snapshot import TrainingSnapshot
from bigbatch.training.step_rates import scale_lr
from bigbatch.training.update import Update

LossOf = Callable[[Batch], Tensor]

CONFIDENCE = 0.9


@dataclass(frozen=True)
class BranchTestResult:
    """What a branch test found. All numbers are over all ranks, and the same on each.

    Args:
        batch_sizes: batch size of each branch.
        lr_factors: factor of each branch's learning rate, by the loop's rule.
        samples: samples that each branch trained on.
        held_aside: samples on which the losses of a repeat were compared.
        first_losses: loss before the branches, by repeat.
        losses: loss after each branch: for each batch size, by repeat.
        critical_batch: B_crit in samples; inf if larger batches lose nothing, nan if unknown.
        interval: 90 % confidence interval of B_crit; 0 or inf where it has no end.
        noise_scale: B_simple at the time, averaged; nan or inf if it was not measured.
        samples_spent: samples of forward and backward; an evaluation counts a third of its samples.
        reason: why an end of the interval is missing; empty if both are known.
    """

    batch_sizes: tuple[int, ...]
    lr_factors: tuple[float, ...]
    samples: int
    held_aside: int
    first_losses: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    critical_batch: float
    interval: tuple[float, float]
    noise_scale: float
    samples_spent: int
    reason: str

    @property
    def ratio(self) -> float:
        """B_crit / B_simple; nan unless B_simple is positive and finite."""
        known = math.isfinite(self.noise_scale) and self.noise_scale > 0
        return self.critical_batch / self.noise_scale if known else math.nan

    def __str__(self) -> str:
        low, high = self.interval
        lines = [
            f"critical batch {self.critical_batch:.4g} ({low:.4g} to {high:.4g}), "
            f"{self.ratio:.3g} x noise scale {self.noise_scale:.4g}"
            + (f"; {self.reason}" if self.reason else ""),
            f"{'batch':>8}  {'rate':>8}  {'loss':>10}  from {fmean(self.first_losses):.6g} in "
            f"{self.samples} samples, {len(self.first_losses)} repeats",
        ]
        rows = zip(self.batch_sizes, self.lr_factors, self.losses, strict=True)
        lines += [
            f"{size:>8}  x {factor:<6.3g}  {fmean(losses):>10.6g}" for size, factor, losses in rows
        ]
        return "\n".join(lines)


def branch_test(
    model: nn.Module,
    update: Update,
    batches: Batches | ExternalBatches,
    loss_of: LossOf,
    request: BranchRequest,
) -> BranchTestResult:
    """Trains the branches and restores everything; see `AdaptiveBatch.branch_test`. Collective."""
    parts = update.parts
    ranks, source = parts.collectives.ranks, parts.meter.source
    if not isinstance(batches, Batches):
        raise SettingError(
            "another loop gives the micro-batches; run a branch test in a loop over a loader"
        )
    if batches.unit == "tokens":
        raise SettingError('a branch test counts samples; run it in a loop without unit="tokens"')
    if parts.meter.source.engine is not None:
        raise SettingError(
            "DeepSpeed's engine runs the backwards and steps, which a branch test does itself; run "
            "it in a loop without DeepSpeed"
        )
    if parts.reader is not None:
        raise SettingError(
            f"{type(parts.optimizer).__name__} needs the gradient of each micro-batch of the loop; "
            "run a branch test with its base optimizer, at the same learning rate"
        )
    if parts.scaler is not None:
        raise SettingError("a GradScaler may skip steps of a branch; use bfloat16 instead of one")
    left = None if batches.samples is None else batches.samples - batches.open * batches.consumed
    arguments = update.planner.plan.batch_size, ranks, averaging_steps(parts.optimizer)
    plan = request.plan(*arguments, left)
    with batches.peek(plan.read // ranks, update.past.epoch) as (samples, available):
        fewest = min(count for (count,) in parts.collectives.all_gather(available))
        if fewest * ranks < plan.read:
            plan = request.plan(*arguments, int(fewest) * ranks)
        factors = update.rates.factors_of(plan.batch_sizes)
        with ExitStack() as undo:
            snapshot = TrainingSnapshot(model, parts.optimizer)
            undo.callback(source.restart)
            undo.callback(snapshot.restore)
            undo.callback(source.reducer.set_requires_gradient_sync, True)
            branches = _Branches(update, loss_of, samples, snapshot, plan)
            first_losses, losses = branches.train(factors)
    curves = []
    for size, rows in zip(plan.batch_sizes, losses, strict=True):
        gains = [[first - x for x in row] for first, row in zip(first_losses, rows, strict=True)]
        curves.append(BranchCurve(size, [size * step for step in plan.points(size)], gains))
    found = critical_batch(curves, CONFIDENCE)
    return BranchTestResult(
        batch_sizes=plan.batch_sizes,
        lr_factors=factors,
        samples=plan.samples,
        held_aside=plan.held_aside,
        first_losses=tuple(first_losses),
        losses=tuple(tuple(row[-1] for row in rows) for rows in losses),
        critical_batch=found.estimate,
        interval=(found.low, found.high),
        noise_scale=update.past.noise_scale,
        samples_spent=plan.cost,
        reason=found.reason,
    )


class _Branches:
    """Trains every branch of every repeat from one snapshot."""

    def __init__(
        self,
        update: Update,
        loss_of: LossOf,
        samples: SampleBuffer,
        snapshot: TrainingSnapshot,
        plan: BranchPlan,
    ) -> None:
        parts, self._micro_batch = update.parts, update.planner.max_micro_batch
        self._optimizer, self._source = parts.optimizer, parts.meter.source
        self._collectives, self._ranks = parts.collectives, parts.collectives.ranks
        self._loss_of, self._samples, self._snapshot, self._plan = loss_of, samples, snapshot, plan
        self._packed = update.packed
        self._weightings: set[str] = set()  # of all losses, where they matter

    def train(self, factors: tuple[float, ...]) -> tuple[list[float], list[list[list[float]]]]:
        """Losses before the branches, by repeat, and of each branch, by repeat and point."""
        plan = self._plan
        # of its own on each rank, for dropout; the same for all branches of a repeat
        seeds = torch.randint(2**40, (plan.repeats,)).tolist()
        first_losses: list[float] = []
        losses: list[list[list[float]]] = [[] for _ in plan.batch_sizes]
        for repeat, seed in enumerate(seeds):
            start = repeat * plan.read // plan.repeats // self._ranks
            self._restart()
            sums = self._loss_sum(start, seed)
            for size, factor in zip(plan.batch_sizes, factors, strict=True):
                self._restart()
                with scale_lr(self._optimizer, factor):
                    sums += self._train_branch(size // self._ranks, plan.points(size), start, seed)
            columns = zip(*self._collectives.all_gather(*sums), strict=True)
            totals = map(math.fsum, columns)
            pairs = zip(totals, totals, strict=True)
            means = (loss / weight if weight else math.nan for loss, weight in pairs)
            first_losses.append(next(means))
            for size, of_branch in zip(plan.batch_sizes, losses, strict=True):
                of_branch.append([*islice(means, len(plan.points(size)))])
        return first_losses, losses

    def _restart(self) -> None:
        self._snapshot.restore()
        self._source.zero_grad()

    def _train_branch(self, rows: int, points: list[int], start: int, seed: int) -> list[float]:
        """`_loss_sum` of one branch after so many steps of `rows` samples of this rank."""
        sums: list[float] = []
        first = start + self._plan.held_aside // self._ranks
        seed_torch(seed)
        for step in range(1, points[-1] + 1):
            parts = self._parts(first, first + rows)
            weights: list[float] = []
            for number, (batch, samples) in enumerate(parts, start=1):
                # before the forward, which reads it
                self._source.reducer.set_requires_gradient_sync(number == len(parts))
                loss, weight = self._loss(batch, samples)
                weights.append(weight)
                if weight or self._ranks > 1:
                    weighted_loss(loss, weight / rows).backward()  # type: ignore[no-untyped-call]
            # the mean weight of a sample, over the ranks' means, divides the gradient
            means = self._collectives.all_gather(math.fsum(weights) / rows)
            if (total := math.fsum(mean for (mean,) in means)) not in (0, len(means)):
                self._source.scale(len(means) / total)
            if total > 0:
                self._optimizer.step()
            self._source.zero_grad()
            first += rows
            if step in points:
                sums += self._loss_sum(start, seed)
                seed_torch(seed + step)
        return sums

    def _loss_sum(self, start: int, seed: int) -> list[float]:
        """The sum of weight x loss over this rank's held-aside samples, and that of the weights."""
        seed_torch(seed)  # so that dropout is the same for all branches
        self._source.reducer.set_requires_gradient_sync(False)  # no backward follows
        sums = []
        for batch, samples in self._parts(start, start + self._plan.held_aside // self._ranks):
            loss, weight = self._loss(batch, samples)
            # it is nan without a weight
            sums.append((weight and weight * float(loss.detach()), weight))
            del loss  # and with it its graph
        self._source.zero_grad()  # what an engine has gathered for the forward
        return [math.fsum(column) for column in zip(*sums, strict=True)]

    def _loss(self, batch: Batch, samples: int) -> tuple[Tensor, float]:
        """The loss of a micro-batch, and what its mean is over, as for `step.backward`."""
        loss = one_number(self._loss_of(batch), "loss_of")
        labels = label_weights(loss, samples, packed=self._packed)
        weight = samples if labels is None else float(labels.sum())
        if labels is None or weight != samples:
            self._weightings.add("samples" if labels is None else "labels")
        if len(self._weightings) > 1:
            raise LoopError("loss_of is a mean over labels in some batches only; return one kind")
        return loss, weight

    def _parts(self, start: int, stop: int) -> list[tuple[Batch, int]]:
        """Samples of this rank as micro-batches of about equal sizes."""
        rows = stop - start
        count = -(-rows // self._micro_batch)
        cuts = [start + rows * number // count for number in range(count + 1)]
        parts = [part for cut in pairwise(cuts) for part in self._samples.peek(*cut)]
        if len(parts) > count and self._source.reducer.lockstep:
            raise BatchError(
                "batches of different shapes cannot be concatenated, and the ranks must do equally "
                "many backwards; pad them to one length in the collate function"
            )
        return parts
