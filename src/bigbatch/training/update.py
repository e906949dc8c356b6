"""The end of a step: decides, steps the optimizer and the schedule, counts, plans the next."""

import copy
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.optim import Optimizer

from bigbatch.data.batches import Batches
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rank_consistency import HostCollectives, checksum, facts_of, optimizer_facts
from bigbatch.errors import LoopError, SettingError
from bigbatch.log.run_log import RunLog
from bigbatch.log.step_record import StepRecord
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from bigbatch.policies.bound_notes import note_of
from bigbatch.policies.controller import Controller
from bigbatch.policies.goodput import LossTrend
from bigbatch.policies.lr_scaling import LRScaling, resolve_scaling
from bigbatch.policies.plan import BatchPlan, PlanConstraints
from bigbatch.policies.policy import Decision, Fixed, TrainingState, has_state
from bigbatch.policies.step_time import StepTimes
from bigbatch.state_checks import loads_state
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.loss_check import LossCheck
from bigbatch.training.measuring_interval import MeasuringInterval
from bigbatch.training.oom_hints import OomHints
from bigbatch.training.scaled_lr import scale_lr
from bigbatch.training.scheduler import BaseBatchScheduler, LRChanges
from bigbatch.training.transport import require_transportable, transported

_NO_PAIR = (
    "no step was measured in the first pass: min_micro_batches=1 compares two steps of one pass, "
    "of similar sizes, and there were none; take smaller batches, or leave min_micro_batches out"
)
_NOISE_STEPS = 16  # measured steps over which the noise is averaged for a branch test


@dataclass(frozen=True)
class StepStatistics:
    """Everything that a decision rests on, read from the step's gradients; equal on all ranks."""

    samples: int  # samples of the step, over all ranks
    micro_batches: int  # backwards of the step, over all ranks
    statistics: GradientStatistics | None  # None if it could not be measured
    loss: float  # mean loss over the batch
    finite: bool  # whether every gradient is finite
    vanishes: bool  # whether every gradient is zero
    weight_per_sample: float  # mean weight of a sample
    elapsed_seconds: float  # time spent training so far, mean over the ranks
    previous_seconds: float  # time of the step before, mean over the ranks; 0 if unknown
    checksums: list[float]  # a checksum of each rank's state, which must be equal


# [Note: Agreement of ranks]
# Every rank decides by itself, and all decide alike by construction: statistics, loss, seconds and
# `finite` are read from sums over the ranks, so they are the same number on each, and a policy is a
# function of them. Nothing is sent to agree on a decision. What may still differ is code (another
# setting, a scheduler that one rank advanced, a policy that reads a clock), and it would end in
# ranks that wait for each other in vain. So each rank adds a checksum of everything that decides a
# step, `_facts`, to the sums of that step: the comparison costs no message and no wait. It is of
# the state *before* the decision, and so tells of a difference one step after it came up, before
# the optimizer steps. Only if checksums differ are the facts themselves sent, for the error.
# Seconds differ between ranks; decisions use their mean, which is sent with the checksum.


class Update:
    """The objects that all steps share, the state between two steps, and the end of each step.

    Raises:
        SettingError: an unknown rule, or one that counteracts the policy; or no step is measured,
            and something needs statistics; or transport does not go with optimizer or bounds.
    """

    def __init__(
        self,
        meter: GradientMeter,
        optimizer: Optimizer,
        batches: Batches | ExternalBatches,
        controller: Controller,
        constraints: PlanConstraints,
        lr_scaling: LRScaling,
        *,
        every: int | None = None,
        transport: bool = False,
    ) -> None:
        self.epoch = self.samples = self.steps = self.skipped = 0
        self.record: StepRecord | None = None  # of the last step
        self.log: RunLog | None = None  # gets the record of every step
        self.last_measured: StepRecord | None = None  # of the last measured step
        self.weight_per_sample: float | None = None  # in the last step
        self.noise_average = NoiseAverage(_NOISE_STEPS, "steps")  # of measured steps
        self.max_micro_batch = constraints.micro_batch  # most samples of a backward of one rank
        self.step_seconds = 0.0  # of the last step, on this rank; 0 before the first
        self.meter, self.scaler, self.optimizer = meter, meter.scaler, optimizer
        self.reader = micro_batch_optimizer(optimizer)  # if it reads each micro-batch's gradient
        # its own source, if each backward is reduced over the ranks
        self.reduced = None if self.reader is None else self.reader.reduced_source()
        self.collectives = collectives = HostCollectives(meter.source)
        external = isinstance(batches, ExternalBatches)
        self._warns = warns = collectives.rank == 0
        self.oom_hints = OomHints(collectives.rank, collectives.ranks, external=external)
        self.loss_check = LossCheck(warns=warns, has_scaler=self.scaler is not None)
        self.clock = BaseBatchScheduler(controller.base_batch, optimizer)
        self._step_times, self._loss_trend = StepTimes(collectives.ranks), LossTrend()
        self._timed: tuple[int, bool] | None = None  # the last step: its size, whether measured
        rule = repr(lr_scaling) if isinstance(lr_scaling, str | None) else "a function"
        self.settings = {  # as text; must be equal on all ranks
            **{name: repr(value) for name, value in vars(constraints).items()},
            "remainder": repr(batches.remainder),
            "order": batches.order,
            "lr_scaling": rule,
            "transport": repr(transport),
            "every": repr(every),
        }
        # if steps of one backward are measured, by comparing two of them
        self.pairs: ConsecutiveSteps | None = None
        if constraints.min_micro_batches == 1 and collectives.ranks == 1:
            self.pairs = ConsecutiveSteps(meter.layers, meter.confidence)
        self.interval = interval = MeasuringInterval(every, pairs=self.pairs is not None)
        self._scaling: Any = resolve_scaling(lr_scaling, controller.base_batch)
        self._batches, self._controller = batches, controller
        self._fit_plan = lru_cache(maxsize=4)(constraints.plan)
        self._weightings: set[int] = set()  # of each rank, once it was asked
        self._half_done = False  # whether a step has failed after it may have changed something
        self._earlier_seconds = 0.0  # before the last resumption
        self._started = self._step_started = time.perf_counter()
        self._start_step(0)
        policy = type(controller.policy).__name__
        follower = policy if controller.needs.lr_decay else ""
        self.lr_changes = LRChanges(optimizer, warns=warns, follower=follower)
        if controller.needs.statistics:
            interval.require_statistics(f"policy={policy}")
        if lr_scaling == "adascale":
            interval.require_statistics('lr_scaling="adascale"')
        if (needed := controller.needs.lr_scaling) not in ("any", lr_scaling):
            raise SettingError(
                f"lr_scaling={lr_scaling!r} with {policy}, which changes the learning rate itself, "
                f"gives a wrong one; pass lr_scaling={needed!r}"
            )
        self.clock.follows_rates = controller.needs.lr_decay
        self._transports = transport
        if transport:
            is_fixed, size = isinstance(controller.policy, Fixed), controller.decision.batch_size
            bounds = (size, size) if is_fixed else (controller.min_batch, controller.max_batch)
            is_vr = self.reader is not None
            require_transportable(optimizer, controller.base_batch, *bounds, is_vr=is_vr)

    @property
    def elapsed_seconds(self) -> float:
        """Time spent training, over all resumptions."""
        return self._earlier_seconds + time.perf_counter() - self._started

    # between two steps

    @property
    def plan(self) -> BatchPlan:
        """How the next step is cut into micro-batches."""
        return self._plan(measured=self.interval.due)

    def _plan(self, *, measured: bool) -> BatchPlan:
        """The plan of the next step, if it is measured and if not: one backward may do then."""
        controller, compared = self._controller, measured or self.reader is not None
        bounds = controller.min_batch, controller.max_batch
        return self._fit_plan(controller.decision.batch_size, *bounds, compared=compared)

    def _start_step(self, number: int) -> None:
        """Lets the meter read a measured step, unless its one gradient is compared with another."""
        compares_steps = self.pairs is not None and self.plan.micro_batches == 1
        self.meter.at_step(number, due=self.interval.due and not compares_steps)

    @property
    def first_of_pair(self) -> dict[str, Any] | None:
        """A state of the step that the next one is compared with; None if there is none."""
        return None if self.pairs is None else self.pairs.state_dict()

    def end_pass(self) -> None:
        """Counts an epoch; the length of the loader is known now."""
        if self.pairs is not None:
            self.pairs.forget()  # the next pass has the same samples, so both steps may share some
            needs = self._controller.needs.statistics and self.interval.every is not None
            if self._warns and needs and math.isnan(self.average_noise_scale):
                warnings.warn(_NO_PAIR, stacklevel=3)
        self.limit_batch()
        self.epoch += 1

    def limit_batch(self) -> None:
        """Bounds the batch by the data set, if its size is known."""
        samples = self._batches.samples
        if samples is not None and samples >= self._controller.given_min_batch:
            self._controller.limit(max_batch=samples)

    def _scale(self, batch_size: int, statistics: GradientStatistics | None) -> float:
        """The part of the factor that follows from the batch size."""
        scale: float = self._scaling(batch_size, self.clock.base_batch, statistics)
        return scale

    def factors_of(self, batch_sizes: Sequence[int]) -> tuple[float, ...]:
        """The factor that a step of each size would have, not measured; keeps the rule's state."""
        scaling = self._scaling if has_state(self._scaling) else None
        saved = None if scaling is None else copy.deepcopy(scaling.state_dict())
        lr_factor = self._controller.decision.lr_factor
        factors = tuple(self._scale(batch_size, None) * lr_factor for batch_size in batch_sizes)
        if scaling is not None:
            scaling.load_state_dict(saved)
        return factors

    @property
    def average_noise_scale(self) -> float:
        """B_simple averaged over 16 measured steps; nan before the first."""
        average = self.noise_average
        return GradientStatistics(average.grad_sqnorm, average.grad_variance, 1, 0).noise_scale

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Does something between two steps whose time and learning rates are not the next step's.

        Raises:
            LoopError: an earlier step failed half way.
        """
        self._require_ready()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._step_started += time.perf_counter() - started
            self.lr_changes.note()

    def rank_message(self) -> tuple[float, float]:
        """A rank's elapsed seconds and a checksum of its state; [Note: Agreement of ranks]."""
        several = self.collectives.ranks > 1
        return self.elapsed_seconds, self._checksum(waits=False) if several else 0.0

    def require_equal_ranks(self, subject: str) -> None:
        """Raises RankError if the ranks differ in what decides a step. Collective."""
        if self.collectives.ranks > 1:
            rows = self.collectives.all_gather(self._checksum(), subject=subject)
            self.collectives.require_equal([value for (value,) in rows], subject, self._facts)

    def require_same_weighting(self, weighting: int) -> None:
        """Raises LoopError unless losses are weighted alike everywhere; collective at first."""
        if not self._weightings:
            self._weightings = {round(value) for (value,) in self.collectives.all_gather(weighting)}
        if self._weightings != {weighting}:
            raise LoopError(
                "weight= is given on some ranks, or in some steps, and not in others; if "
                "gradients are sharded a variance-reduced optimizer needs it always or never"
            )

    # the end of a step

    @contextmanager
    def end_step(self, step: StepStatistics) -> Iterator[None]:
        """Ends a step with these statistics; the optimizer steps inside, at scaled learning rates.

        Raises:
            LoopError: the scheduler is missing or was advanced elsewhere, and nothing is changed;
                or an earlier call failed half way.
            RankError: the ranks differ in what decides a step.
        """
        subject = "what decides a step"  # see [Note: Agreement of ranks]
        self.collectives.require_equal(step.checksums, subject, self._facts)
        self.clock.require_ready()
        self._require_ready()
        target_batch_size = self._controller.decision.batch_size
        scale = self._scale(step.samples, step.statistics)
        lr_factor = scale * self._controller.decision.lr_factor
        complete = self._batches.is_complete(step.samples, self.plan)
        ratio = step.samples / self.clock.base_batch
        moved = transported(self.optimizer, ratio, scale) if self._transports else nullcontext()
        with scale_lr(self.optimizer, lr_factor) as rates, moved:
            self._half_done = True
            follows_rates = self.clock.follows_rates  # then it decides by the next step's rate
            decision = None if follows_rates else self._decide(step, complete=complete)
            yield
        if step.finite:
            self.clock.advance(step.samples)
        if decision is None:
            decision = self._decide(step, complete=complete)
        self.samples += step.samples
        self.steps += step.finite
        self.skipped += not step.finite
        self._half_done = False
        if self._controller.needs.history:
            self._note_history(step)
        if self.pairs is not None and not step.finite:
            self.pairs.forget()
        measured = step.statistics is not None or not self.interval.due
        self.interval.end_step(decides=step.finite and complete and measured)
        self._start_step(self.meter.step + 1)
        self.record = StepRecord(
            step=self.steps + self.skipped,
            epoch=self.epoch,
            samples=self.samples,
            batch_size=step.samples,
            target_batch_size=target_batch_size,
            micro_batches=step.micro_batches,
            loss=step.loss,
            lr=tuple(rates),
            statistics=step.statistics,
            skipped=not step.finite,
            decision=decision,
            elapsed_seconds=step.elapsed_seconds,
            every=self.interval.every,
            gsnr=self.reader.gsnr if self.reader is not None and step.finite else None,
        )
        if self.log is not None:
            self.log.record(self.record)
        if step.statistics is not None:
            self.last_measured = self.record
            self.noise_average.add(step.statistics)
        self.lr_changes.note(self.epoch)
        self.loss_check.compare(step.samples / step.micro_batches, step.loss)
        self.weight_per_sample = step.weight_per_sample
        self._zero_grad()
        now = time.perf_counter()
        self.step_seconds, self._step_started = now - self._step_started, now

    def _note_history(self, step: StepStatistics) -> None:
        """Adds the loss of a step, and the time of the one before it."""
        self._loss_trend.add(step.samples, step.loss)
        if self._timed is not None:
            batch_size, measured = self._timed
            self._step_times.add(batch_size, step.previous_seconds, measured=measured)
        self._timed = step.samples, step.statistics is not None

    def _decide(self, step: StepStatistics, *, complete: bool) -> Decision:
        """The decision on the next batch size; the present one if this step cannot decide."""
        present = self._controller.decision
        if not step.finite:
            reason = "skipped: the gradient is not finite"
        elif not complete:
            reason = "the end of an epoch does not decide"
        elif step.statistics is None and self._controller.needs_measurement:
            reason = f"not measured; one step in {self.interval.every} is"
            if self.pairs is not None and self.interval.due:
                reason = "not measured yet; the next step is compared with this one"
        else:
            now = TrainingState(
                target_batch_size=present.batch_size,
                batch_size=step.samples,
                samples=self.samples + step.samples,
                steps=self.steps + 1,
                epoch=self.epoch,
                lr_decay=self.clock.lr_decay,
                step_times=self._step_times.sizes,
                loss_trend=self._loss_trend.trend,
            )
            decision = self._controller.next(step.statistics, now)
            if self._warns and (note := note_of(decision.reason)):
                warnings.warn(note, stacklevel=7)  # the line of step.update
            return decision
        return Decision(present.batch_size, reason, present.lr_factor)

    def _require_ready(self) -> None:
        """Checks that all is as the last step left it."""
        if self._half_done:
            raise LoopError("update() failed half way; load an earlier checkpoint")
        self.lr_changes.examine(self.epoch, self.clock.scheduler)

    def _zero_grad(self) -> None:
        """Zeroes the gradients and forgets the micro-batches of an unfinished step."""
        self.meter.source.zero_grad()
        if self.reduced is not None:
            self.reduced.restart()

    # what must be equal on all ranks

    def _facts(self, *, waits: bool = True) -> dict[str, str]:
        """What must be equal on all ranks, by name, as text; see [Note: Agreement of ranks]."""
        optimizer, reader, meter = self.optimizer, self.reader, self.meter
        kind = type(optimizer).__name__ if reader is None else reader.describe()
        facts = {
            "controller": self._controller.facts(),
            **self.settings,
            "epoch": self.epoch,
            "samples": self.samples,
            "steps": self.steps,
            "skipped": self.skipped,
            "scheduler": type(self.clock.scheduler).__name__,
            "scaler": None if self.scaler is None else type(self.scaler).__name__,
            "learning rates of the last step": None if self.record is None else self.record.lr,
            "the log": "given" if self.log is not None else None,
            "the plan": self.plan,
            "the meter's step": meter.step,
            "the interval of measured steps": self.interval.every,
            "whether the next step is measured": self.interval.due,
            "the meter's confidence": meter.confidence,
        }
        return optimizer_facts(optimizer, kind, waits=waits) | facts_of(facts)

    def _checksum(self, *, waits: bool = True) -> float:
        return checksum(repr(self._facts(waits=waits)))

    # states

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`, the same on all ranks."""
        scaling = self._scaling.state_dict() if has_state(self._scaling) else None
        return {
            "controller": self._controller.state_dict(),
            "clock": self.clock.state_dict(),
            "scaling": scaling,
            "counts": [self.epoch, self.samples, self.steps, self.skipped],
            "settings": dict(self.settings),
            "batch_size": self.plan.batch_size,
            "weight_per_sample": self.weight_per_sample,
            "measures_again": self.interval.again,
            "step_times": self._step_times.state(),
            "loss_trend": self._loss_trend.state(),
            "noise": self.noise_average.state_dict(),
        }

    @loads_state
    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Continues from a saved state; the state of another scaling rule is left out.

        Raises:
            StateError: the schedule is another one.
        """
        self._controller.load_state_dict(state["controller"])
        self.clock.load_state_dict(state["clock"])
        same_rule = state["settings"]["lr_scaling"] == self.settings["lr_scaling"]
        if same_rule and has_state(self._scaling) and state["scaling"] is not None:
            self._scaling.load_state_dict(state["scaling"])
        self.epoch, self.samples, self.steps, self.skipped = map(int, state["counts"])
        weight = state["weight_per_sample"]
        self.weight_per_sample = None if weight is None else float(weight)
        self._earlier_seconds = float(own["elapsed_seconds"])
        self.step_seconds = float(own["step_seconds"])
        self._started = self._step_started = time.perf_counter()
        self._half_done = False
        self._zero_grad()
        step = self.steps + self.skipped
        self.interval.start(step, again=state["measures_again"])
        self._step_times.load(state["step_times"])
        self._timed = None
        self._loss_trend.load(state["loss_trend"])
        self.noise_average.load_state_dict(state["noise"])
        if self.pairs is not None:
            self.pairs.load_state_dict(own.get("first_of_pair"))
        self._start_step(step)
