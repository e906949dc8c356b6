"""The end of a step: decides, steps the optimizer and the schedule, counts, plans the next."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from bigbatch.data.batches import Batches
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.data.rank_consistency import (
    are_equal,
    checksum,
    checksum_sums,
    facts_of,
    optimizer_facts,
)
from bigbatch.errors import LoopError, SettingError
from bigbatch.log.run_log import RunLog
from bigbatch.log.step_record import StepRecord
from bigbatch.optim.optimizer_settings import name_of
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan import PlanConstraints
from bigbatch.policies.policy import Decision
from bigbatch.state_checks import loads_state
from bigbatch.statistics.consecutive_steps import ConsecutiveSteps
from bigbatch.training.loop_options import LoopOptions
from bigbatch.training.past_steps import PastSteps
from bigbatch.training.step_planner import StepPlanner
from bigbatch.training.step_rates import StepRates
from bigbatch.training.step_sums import StepStatistics
from bigbatch.training.training_parts import TrainingParts

_NO_PAIR = (
    "no step was measured in the first pass: min_micro_batches=1 compares two steps of one pass, "
    "of similar sizes, and there were none; take smaller batches, or leave min_micro_batches out"
)


class Update:
    """Ends the steps of a training, one after the other; arguments as of `AdaptiveBatch`."""

    def __init__(
        self,
        parts: TrainingParts,
        batches: Batches | ExternalBatches,
        controller: Controller,
        constraints: PlanConstraints,
        options: LoopOptions,
    ) -> None:
        lr_scaling, every = options.get("lr_scaling", "sqrt"), options.get("every")
        transport = options.get("transport", False)
        self.parts, self.packed = parts, batches.packed
        self.log: RunLog | None = None  # gets the record of every step
        self.past = PastSteps(parts.collectives.ranks, keeps_history=controller.needs.history)
        self.rates = StepRates(parts, lr_scaling, controller, transport=transport)
        readers = [f"policy={type(controller.policy).__name__}"] * controller.needs.statistics
        readers += ['lr_scaling="adascale"'] * (lr_scaling == "adascale")
        if every == 0 and readers:
            raise SettingError(
                f"{readers[0]} needs measured steps, and every=0 measures none; leave every= out"
            )
        if constraints.min_micro_batches == 1 and parts.collectives.ranks == 1:
            if parts.collectives.processes > 1:
                raise SettingError(
                    "min_micro_batches=1 compares consecutive steps in one process, and tensor "
                    "parallelism has slices of them; leave it out, or cut each step into 2 or more"
                )
            parts.pairs = ConsecutiveSteps(parts.meter.layers, parts.meter.confidence)
        self.planner = StepPlanner(parts, batches, controller, constraints, self.past, every)
        self._weightings: set[int] = set()  # of each rank, once it was asked
        self.settings = {  # as text; must be equal on all ranks
            **{name: repr(value) for name, value in vars(constraints).items()},
            "remainder": repr(batches.remainder),
            "unit": batches.unit,
            "order": batches.order,
            "lr_scaling": self.rates.rule,
            "transport": repr(transport),
            "every": repr(every),
            "accumulate_float32_above": repr(options.get("accumulate_float32_above")),
        }
        self._half_done = False  # whether a step has failed after it may have changed something
        # reads the last step, where the host has not: [Note: A step that measures nothing]
        self._unsettled: Callable[[], None] | None = None

    def end_pass(self) -> None:
        """Counts an epoch; the length of the loader is known now."""
        self.settle()
        if (pairs := self.parts.pairs) is not None:
            pairs.forget()  # the next pass has the same samples, so both steps may share some
            needs = self.planner.controller.needs.statistics
            is_due = needs and self.planner.every is not None
            if self.parts.warns and is_due and math.isnan(self.past.noise_scale):
                warnings.warn(_NO_PAIR, stacklevel=3)
        self.planner.limit_batch()
        self.past.epoch += 1

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Does something between two steps whose time and rates are not the next step's."""
        self.settle()
        self._require_ready()
        started = time.perf_counter()
        try:
            yield
        finally:
            self.past.step_started += time.perf_counter() - started
            self.rates.changes.note()

    @property
    def can_wait(self) -> bool:
        """Whether nothing that is done before the next step ends depends on what the host reads."""
        controller = self.planner.controller
        is_certain = controller.repeats or controller.needs_measurement  # whatever the loss is
        return is_certain and not (self.past.keeps_history or self.rates.clock.follows_rates)

    @contextmanager
    def end_step(
        self, step: StepStatistics, read: Callable[[], StepStatistics] | None = None
    ) -> Iterator[None]:
        """Ends a step with these statistics; the optimizer steps inside, at scaled learning rates.

        With `read`, if `can_wait`, `step` has only what the host knows: `read` reads all of it
        later, and the optimizer skips on the device. Errors before the block have changed nothing.
        """
        self.settle()
        parts, planner, rates, past = self.parts, self.planner, self.rates, self.past
        if not step.ranks_agree:
            parts.collectives.require_equal("what decides a step", self._texts)
        self._require_ready()
        target_batch_size = planner.controller.decision.batch_size
        complete = planner.is_complete(step.samples)
        decide = partial(planner.decide, complete=complete, unmeasured=planner.unmeasured)
        decision = None
        with rates.in_force(step.samples, step.statistics) as lr:
            self._half_done = True
            if read is None and not rates.clock.follows_rates:
                decision = decide(step, lr_decay=None)
            yield
        if read is None:
            if step.finite:
                rates.clock.advance(step.samples)
            if decision is None:  # by the next step's rate
                decision = decide(step, lr_decay=rates.clock.lr_decay)
        self._half_done = False
        planner.end_step(step, complete=complete)
        record = StepRecord.unread(
            self.settle,
            step=parts.meter.step,
            epoch=past.epoch,
            samples=past.samples + step.samples,
            batch_size=step.samples,
            target_batch_size=target_batch_size,
            micro_batches=step.micro_batches,
            lr=tuple(lr),
            statistics=step.statistics,
            elapsed_seconds=step.elapsed_seconds,
            every=planner.every,
            gsnr=parts.reader.gsnr if parts.reader is not None and step.finite else None,
        )
        past.add(record, step)
        if decision is None:
            assert read is not None
            self._unsettled = partial(self._settle, record, read, decide)
        else:
            self._complete(record, step, decision)
        rates.changes.note(past.epoch)
        parts.zero_grad()
        past.end_step()

    def settle(self) -> None:
        """Reads the last step, if the host has not, and does everything that depends on it."""
        if self._unsettled is not None:
            self._unsettled()

    def _settle(
        self,
        record: StepRecord,
        read: Callable[[], StepStatistics],
        decide: Callable[..., Decision],
    ) -> None:
        clock, changes, epoch = self.rates.clock, self.rates.changes, self.past.epoch
        step = read()
        if clock.scheduler is not None:
            changes.examine(epoch, clock.scheduler)
        if step.finite:
            clock.advance(step.samples)
        self._unsettled = None
        self._complete(record, step, decide(step, lr_decay=None))
        if clock.scheduler is not None:
            changes.note(epoch)

    def _complete(self, record: StepRecord, step: StepStatistics, decision: Decision) -> None:
        """Counts a step that was read, and logs its record."""
        past = self.past
        past.steps += step.finite
        past.skipped += not step.finite
        past.weight_per_sample = step.weight_per_sample or past.weight_per_sample
        record.complete(loss=step.loss, skipped=not step.finite, decision=decision)
        if self.log is not None:
            self.log.record(record)
        self.parts.loss_check.end_step()

    def _require_ready(self) -> None:
        """Checks that all is as the last step left it."""
        self.rates.clock.require_ready()
        if self._half_done:
            raise LoopError("update() failed half way; load an earlier checkpoint")
        self.rates.changes.examine(self.past.epoch, self.rates.clock.scheduler)

    def checksum(self, *, waits: bool = False) -> float:
        """A checksum of what decides a step, which several ranks send with the sums of each.

        It is of the state before the decision: a difference is found one step later.
        """
        return checksum(repr(self._facts(waits)))

    def require_equal_ranks(self, subject: str) -> None:
        """Raises RankError if the ranks differ in what decides a step. Collective."""
        if (collectives := self.parts.collectives).processes > 1:
            sums = collectives.sum(*checksum_sums(self.checksum(waits=True)), subject=subject)
            if not are_equal(sums, collectives.processes):
                collectives.require_equal(subject, self._texts)

    def require_same_weighting(self, weighting: int) -> None:
        """Raises LoopError unless losses are weighted alike everywhere; collective at first."""
        if not self._weightings:
            rows = self.parts.collectives.all_gather(weighting)
            self._weightings = {round(value) for (value,) in rows}
        if self._weightings != {weighting}:
            raise LoopError(
                "weight= is given on some ranks, or in some steps, and not in others; if "
                "gradients are sharded a variance-reduced optimizer needs it always or never"
            )

    def _texts(self) -> dict[str, str]:
        return facts_of(self._facts())

    def _facts(self, waits: bool = True) -> dict[str, Any]:
        """What must be equal on all ranks, by name: [Note: Agreement of ranks]."""
        parts, past, planner, clock = self.parts, self.past, self.planner, self.rates.clock
        kind = parts.reader.describe() if parts.reader else name_of(parts.optimizer)
        return {
            **optimizer_facts(parts.optimizer, kind, waits=waits),
            "controller": planner.controller.facts(),
            **self.settings,
            "epoch": past.epoch,
            "samples": past.samples,
            "steps": past.steps,
            "skipped": past.skipped,
            "scheduler": clock.kinds or None,
            "scaler": None if parts.scaler is None else type(parts.scaler).__name__,
            "learning rates of the last step": None if past.record is None else past.record.lr,
            "the log": "given" if self.log is not None else None,
            "the plan": planner.plan,
            "the meter's step": parts.meter.step,
            "the interval of measured steps": planner.every,
            "whether the next step is measured": planner.due,
            "the meter's confidence": parts.meter.confidence,
        }

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`, the same on all ranks."""
        self.settle()
        rooms = self.planner, self.rates, self.past
        states = {name: value for room in rooms for name, value in room.state_dict().items()}
        return {**states, "settings": dict(self.settings)}

    @loads_state
    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Continues from a saved state; the state of another scaling rule is left out."""
        past = self.past
        with suppress(LoopError):  # of the run before
            self.settle()
        self._unsettled = None
        self.planner.controller.load_state_dict(state["controller"])
        self.rates.load_state_dict(state)
        past.load_state_dict(state, own)
        self._half_done = False
        self.parts.zero_grad()
        step = past.steps + past.skipped
        if self.parts.pairs is not None:
            self.parts.pairs.load_state_dict(own.get("first_of_pair"))
        self.planner.start(step, again=state["measures_again"])
