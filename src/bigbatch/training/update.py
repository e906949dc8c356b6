"""Ends a step: decides, steps the optimizer, advances the schedule, counts, plans the next one."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.data.batches import Batches
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rank_consistency import HostCollectives, checksum
from bigbatch.data.rank_facts import facts_of, optimizer_facts
from bigbatch.errors import LoopError, SettingError
from bigbatch.optim.micro_batch_optimizer import MicroBatchOptimizer
from bigbatch.policies.controller import Controller, has_state
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.plan_constraints import PlanConstraints
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.loss_check import LossCheck
from bigbatch.training.lr_changes import LRChanges
from bigbatch.training.lr_scaling import LRScaling, multiplied, scaling_named
from bigbatch.training.oom_hints import OomHints
from bigbatch.training.scheduler import BaseBatchScheduler
from bigbatch.training.step_record import StepRecord, StepStatistics


@dataclass(frozen=True)
class StepContext:
    """What every step of a training uses.

    Args:
        meter: reads the gradients; its source counts inside `backward` only.
        optimizer, scaler: of the training.
        reader: the optimizer, where it reads each micro-batch's gradient; else None.
        collectives: between the ranks.
        hints: for a forward that runs out of memory.
        losses: checks what `backward` is given.
    """

    meter: GradientMeter
    optimizer: Optimizer
    scaler: GradScaler | None
    reader: MicroBatchOptimizer | None
    collectives: HostCollectives
    hints: OomHints
    losses: LossCheck


class Update:
    """Everything that a training remembers between two steps.

    Args:
        context: shared with the steps.
        batches: that the plan is cut from.
        controller: decides.
        constraints: what a plan may be.
        lr_scaling: how the learning rate follows the batch.
        settings: of the training, by name, as text; must be equal on all ranks.
    Raises:
        SettingError: an unknown rule, or one that a schedule which decays would undo.
    """

    def __init__(
        self,
        context: StepContext,
        batches: Batches | ExternalBatches,
        controller: Controller,
        constraints: PlanConstraints,
        lr_scaling: LRScaling,
        settings: Mapping[str, str],
    ) -> None:
        self.epoch = self.samples = self.steps = self.skipped = 0
        self.record: StepRecord | None = None  # of the last step
        self.weight_per_sample: float | None = None  # in the last step
        self.clock = BaseBatchScheduler(controller.base_batch, context.optimizer)
        rule = repr(lr_scaling) if isinstance(lr_scaling, str | None) else "a function"
        self.settings = {**settings, "lr_scaling": rule}
        self._scaling: Any = scaling_named(lr_scaling, controller.base_batch)
        self._context, self._batches = context, batches
        self._controller, self._constraints = controller, constraints
        self._lr_changes = LRChanges(context.optimizer, speaks=context.collectives.rank == 0)
        self._weights_given: set[bool] = set()  # of each rank, once it was asked
        self._half_done = False  # whether a step has failed after it may have changed something
        self._earlier_seconds = 0.0  # before the last resumption
        self._started = time.perf_counter()
        self.plan: BatchPlan = self._fit()
        if lr_scaling is not None and getattr(controller.policy, "decays", False):
            raise SettingError(
                "the schedule grows the batch instead of lowering the learning rate, which "
                f"lr_scaling={lr_scaling!r} would raise with it; pass lr_scaling=None (a command's "
                "--lr-scaling none)"
            )

    @property
    def elapsed_seconds(self) -> float:
        """Time spent training, over all resumptions."""
        return self._earlier_seconds + time.perf_counter() - self._started

    # between two steps

    def end_pass(self) -> None:
        """Counts an epoch; a loader of unknown length has shown it by now."""
        self.learn_length()
        self.epoch += 1

    def learn_length(self) -> None:
        """Bounds the batch by the data set, where its size is known."""
        longest = self._batches.samples
        if longest is not None and longest >= self._controller.min_batch:
            self._controller.limit(max_batch=longest)
        self.plan = self._fit()

    def rank_message(self) -> list[float]:
        """What each rank sends with every step: time spent, and a checksum of its state."""
        several = self._context.collectives.ranks > 1
        return [self.elapsed_seconds, self._checksum(waits=False) if several else 0.0]

    def require_equal_ranks(self, what: str) -> None:
        """Raises RankError where something differs that decides a step. Collective."""
        collectives = self._context.collectives
        if collectives.ranks > 1:
            rows = collectives.gather(self._checksum(), what=what)
            collectives.require_equal([value for (value,) in rows], what, self._facts)

    def require_weights(self, *, given: bool) -> None:
        """Raises LoopError unless losses have weights always or never; collective at first."""
        if not self._weights_given:
            rows = self._context.collectives.gather(given)
            self._weights_given = {bool(value) for (value,) in rows}
        if self._weights_given != {given}:
            raise LoopError(
                "weight= is given on some ranks, or in some steps, and not in others; where "
                "gradients are sharded a variance-reduced optimizer needs it always or never"
            )

    def factor(self, batch_size: int, statistics: GradientStatistics | None) -> float:
        """What the learning rate is multiplied by in a step of so many samples."""
        scale: float = self._scaling(batch_size, self.clock.base_batch, statistics)
        return scale * self._controller.decision.lr_factor

    # the end of a step

    @contextmanager
    def around(self, step: StepStatistics) -> Iterator[None]:
        """Ends a step; inside, the learning rate is that of the batch, for the optimizer's step.

        Args:
            step: what was measured.
        Raises:
            LoopError: the scheduler is missing or not where it was left, and nothing is changed;
                or the step has failed here before.
            RankError: the ranks disagree on what decides a step.
        """
        checksums = [value for _, value in step.rank_messages]
        self._context.collectives.require_equal(checksums, "what decides a step", self._facts)
        self.clock.require_ready()
        if self.clock.scheduler is None:
            self._lr_changes.examine(self.epoch)
        if self._half_done:
            raise LoopError("update() failed half way; load an earlier checkpoint")
        current = self._controller.decision
        seconds = fmean(seconds for seconds, _ in step.rank_messages)
        with multiplied(self._context.optimizer, self.factor(step.samples, step.statistics)) as lr:
            self._half_done = True
            decision = self._decide(step, lr, seconds)
            yield
        self._count(step)
        self._half_done = False
        reader = self._context.reader
        self.record = StepRecord(
            step=self.steps + self.skipped,
            epoch=self.epoch,
            samples=self.samples,
            batch_size=step.samples,
            target_batch_size=current.batch_size,
            micro_batches=step.micro_batches,
            loss=step.loss,
            lr=tuple(lr),
            statistics=step.statistics,
            skipped=not step.finite,
            decision=decision,
            elapsed_seconds=seconds,
            gsnr=reader.gsnr if reader is not None and step.finite else None,
        )
        self._prepare_next(step)

    def step_optimizer(self, finite: bool) -> None:
        """Steps the optimizer; where the gradient is not finite, what the scaler wants."""
        optimizer, scaler = self._context.optimizer, self._context.scaler
        if scaler is None:
            if finite:
                optimizer.step()
            return
        if finite:
            scaler.step(optimizer)
        else:
            with suppress(RuntimeError):  # unscaled already, by clipping
                scaler.unscale_(optimizer)
        scaler.update()

    def zero_grad(self) -> None:
        """Zeroes the gradients and forgets the micro-batches of an unfinished step."""
        self._context.meter.source.zero_grad()
        reader = self._context.reader
        if reader is not None and (reduced := reader.reduced_source()) is not None:
            reduced.restart()

    def _decide(self, step: StepStatistics, lr: list[float], seconds: float) -> Decision:
        if not step.finite:
            return self._unchanged("skipped: the gradient is not finite")
        if not self._batches.was_whole(step.samples, self.plan):
            return self._unchanged("the end of an epoch does not decide")
        if step.statistics is None:
            return self._unchanged("not measured")
        now = TrainingState(
            target_batch_size=self._controller.decision.batch_size,
            batch_size=step.samples,
            base_batch=self.clock.base_batch,
            samples=self.samples + step.samples,
            steps=self.steps + 1,
            epoch=self.epoch,
            ranks=self._batches.virtual_ranks,
            lr=tuple(lr),
            elapsed_seconds=seconds,
        )
        return self._controller.next(step.statistics, now)

    def _unchanged(self, reason: str) -> Decision:
        current = self._controller.decision
        return Decision(current.batch_size, reason, current.lr_factor)

    def _count(self, step: StepStatistics) -> None:
        self.samples += step.samples
        if step.finite:
            self.steps += 1
            self.clock.advance(step.samples)
        else:
            self.skipped += 1

    def _prepare_next(self, step: StepStatistics) -> None:
        self._lr_changes.note(self.epoch)
        self._context.losses.compare(step.samples / step.micro_batches, step.loss)
        self.weight_per_sample = step.weight_per_sample
        self.zero_grad()
        self._context.meter.next_step()
        self.plan = self._fit()

    def _fit(self) -> BatchPlan:
        """The plan of the next step. One that nobody measures may be one backward."""
        compared = self._context.meter.due or self._context.reader is not None
        bounds = self._controller.min_batch, self._controller.max_batch
        batch_size = self._controller.decision.batch_size
        return self._constraints.plan(batch_size, *bounds, compared=compared)

    # what must be equal on all ranks

    def _facts(self, *, waits: bool = True) -> dict[str, str]:
        """Everything that must be, by name, as text."""
        optimizer, reader, meter = (
            self._context.optimizer,
            self._context.reader,
            self._context.meter,
        )
        kind = type(optimizer).__name__ if reader is None else reader.describe()
        scaler, record = self._context.scaler, self.record
        counts = {
            "epoch": self.epoch,
            "samples": self.samples,
            "steps": self.steps,
            "skipped": self.skipped,
            "scheduler": type(self.clock.scheduler).__name__,
            "scaler": None if scaler is None else type(scaler).__name__,
            "learning rates of the last step": None if record is None else record.lr,
        }
        return {
            **optimizer_facts(optimizer, kind, waits=waits),
            **facts_of({"controller": self._controller.facts()}),
            **facts_of(self.settings | counts),
            "the plan": repr(self.plan),
            "the meter's step": repr(meter.step),
            "the meter's every": repr(meter.every),
            "the meter's confidence": repr(meter.confidence),
        }

    def _checksum(self, *, waits: bool = True) -> float:
        return checksum(repr(self._facts(waits=waits)))

    # states

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: the same on all ranks."""
        remembers = has_state(self._scaling)
        return {
            "controller": self._controller.state_dict(),
            "clock": self.clock.state_dict(),
            "scaling": self._scaling.state_dict() if remembers else None,
            "counts": [self.epoch, self.samples, self.steps, self.skipped],
            "settings": dict(self.settings),
            "batch_size": self.plan.batch_size,
            "weight_per_sample": self.weight_per_sample,
            "measured": self._context.meter.step,
        }

    def load_state_dict(self, state: dict[str, Any], elapsed_seconds: float) -> None:
        """Continues from a saved state; what another scaling rule remembered is left out.

        Raises:
            StateError: the schedule is another one.
        """
        self._controller.load_state_dict(state["controller"])
        self.clock.load_state_dict(state["clock"])
        same_rule = state["settings"]["lr_scaling"] == self.settings["lr_scaling"]
        if same_rule and has_state(self._scaling) and state["scaling"] is not None:
            self._scaling.load_state_dict(state["scaling"])
        self.epoch, self.samples, self.steps, self.skipped = state["counts"]
        self.weight_per_sample = state["weight_per_sample"]
        self._earlier_seconds, self._started = elapsed_seconds, time.perf_counter()
        self._half_done = False
        self.zero_grad()
        self._context.meter.at_step(state["measured"])
