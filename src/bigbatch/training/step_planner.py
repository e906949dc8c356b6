"""Plans the next step: its batch size, how it is cut, whether it is measured."""

from functools import lru_cache
from typing import Any

from bigbatch.data.batches import Batches
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.loop_warning import warn_in_loop
from bigbatch.policies.bound_notes import note_of
from bigbatch.policies.controller import Controller
from bigbatch.policies.plan import BatchPlan, PlanConstraints
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.training.measuring_interval import MeasuringInterval
from bigbatch.training.past_steps import PastSteps
from bigbatch.training.step_sums import StepStatistics


class StepPlanner:
    """Asks the controller after each step that may decide, and cuts the next one accordingly.

    Args:
        controller: keeps the decided batch size.
        constraints: what every plan has to keep.
        interval: which steps are measured.
        batches: says how many samples a pass has.
        compares: whether every step needs several micro-batches, also one that is not measured.
        warns: whether notes of a decision are warnings on this rank.
    """

    def __init__(
        self,
        controller: Controller,
        constraints: PlanConstraints,
        interval: MeasuringInterval,
        batches: Batches | ExternalBatches,
        *,
        compares: bool,
        warns: bool,
    ) -> None:
        self.controller, self.interval = controller, interval
        self.max_micro_batch = constraints.micro_batch  # most samples of a backward of one rank
        self._batches, self._compares, self._warns = batches, compares, warns
        self._fit_plan = lru_cache(maxsize=4)(constraints.plan)
        self._keep = lru_cache(maxsize=4)(Decision)  # the present one, with another reason

    @property
    def plan(self) -> BatchPlan:
        """How the next step is cut; one backward may do if it is not measured."""
        controller, compared = self.controller, self._compares or self.interval.due
        bounds = controller.min_batch, controller.max_batch
        return self._fit_plan(controller.decision.batch_size, *bounds, compared=compared)

    @property
    def is_certain(self) -> bool:
        """Whether a step that measures nothing cannot change the plan, whatever its loss is."""
        return self.controller.repeats or self.controller.needs_measurement

    def limit_batch(self) -> None:
        """Bounds the batch by the data set, if its size is known."""
        samples = self._batches.samples
        if samples is not None and samples >= self.controller.given_min_batch:
            self.controller.limit(max_batch=samples)

    def is_complete(self, samples: int) -> bool:
        """Whether a step of so many samples was as large as planned, or a whole pass."""
        return self._batches.is_complete(samples, self.plan)

    def unmeasured(self, *, awaits_next: bool) -> str:
        """Why the present step does not decide if it is not measured."""
        if awaits_next:  # two steps are compared, and it is the first
            return "not measured yet; the next step is compared with this one"
        return f"not measured; one step in {self.interval.every} is"

    def decide(
        self,
        step: StepStatistics,
        *,
        past: PastSteps,
        lr_decay: float | None,
        complete: bool,
        unmeasured: str,
    ) -> Decision:
        """The decision on the next batch size; the present one if this step cannot decide.

        Args:
            step: what the host has read of it.
            past: the steps before.
            lr_decay: scheduled rate over its largest so far.
            complete: `is_complete` of the step.
            unmeasured: `unmeasured` of the step.
        """
        controller = self.controller
        present = controller.decision
        if not step.finite:
            reason = "skipped: the gradient is not finite"
        elif not complete:
            reason = "the end of an epoch does not decide"
        elif step.statistics is None and controller.needs_measurement:
            reason = unmeasured
        elif controller.repeat(step.samples):
            return present
        else:
            now = TrainingState(
                target_batch_size=present.batch_size,
                batch_size=step.samples,
                samples=past.samples + step.samples,
                steps=past.steps + 1,
                epoch=past.epoch,
                lr_decay=lr_decay,
                step_times=past.step_times.sizes,
                loss_trend=past.loss_trend.trend,
            )
            decision = controller.next(step.statistics, now)
            if self._warns and (note := note_of(decision.reason)):
                warn_in_loop(note)
            return decision
        return self._keep(present.batch_size, reason, present.lr_factor)

    def end_step(self, *, finite: bool, complete: bool, measured: bool) -> None:
        """Counts a step; the next one is measured if it is due."""
        measured = measured or not self.interval.due
        self.interval.end_step(decides=finite and complete and measured)

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks."""
        return {
            "controller": self.controller.state_dict(),
            "batch_size": self.plan.batch_size,
            "measures_again": self.interval.again,
        }
