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
from bigbatch.training.past_steps import PastSteps
from bigbatch.training.step_sums import StepStatistics
from bigbatch.training.training_parts import TrainingParts

_LARGEST, _STEPS = 16, 32  # the largest n, and t / n below it


# [Note: Which steps are measured]
# Step t, from 0 on, is measured if n divides t:
#     n = min(16, the largest power of two that is at most max(1, t / 32))
# So n is 1 before step 64, 2 before 128, 4 before 256, 8 before 512, and 16 from there on; 19 % of
# 1,000 steps are measured and 7.5 % of 10,000. It depends on nothing but counts, so the same seed
# gives the same run on any machine. A measured step that cannot decide (the end of an epoch, a
# gradient that is not finite) is followed by another one, in addition. Where two consecutive steps
# are compared the first of them cannot decide either, so the one after it is measured too, and so
# on until one decides: for n of 1 and 2 these are all steps, in pairs.


class StepPlanner:
    """Asks the controller after each step that may decide, and cuts the next one accordingly.

    `every` is n for the whole run; 0 measures no step. None: [Note: Which steps are measured].
    """

    def __init__(
        self,
        parts: TrainingParts,
        batches: Batches | ExternalBatches,
        controller: Controller,
        constraints: PlanConstraints,
        past: PastSteps,
        every: int | None,
    ) -> None:
        self.controller = controller
        self.max_micro_batch = constraints.micro_batch  # most samples of a backward of one rank
        self._parts, self._batches, self._past, self._every = parts, batches, past, every
        self._fit_plan = lru_cache(maxsize=4)(constraints.plan)
        self._keep = lru_cache(maxsize=4)(Decision)  # the present one, with another reason
        self.start(0, again=False)

    def start(self, step: int, *, again: bool) -> None:
        """Starts the step of this number; measures it again if the last one should have decided."""
        self.every = self._every or None  # the present n; None if no step is measured
        if self._every is None:
            self.every = min(_LARGEST, 1 << (max(1, step // _STEPS).bit_length() - 1))
        self._is_nth = self.every is not None and step % self.every == 0
        self.again, self.due = again, self._is_nth or again
        parts = self._parts  # a gradient that is compared with another is not the meter's
        has_pair = self.due and parts.pairs is not None and self.plan.micro_batches == 1
        parts.compares = has_pair
        parts.meter.at_step(step, due=self.due and not has_pair)

    @property
    def plan(self) -> BatchPlan:
        """How the next step is cut; one backward may do if nothing compares several."""
        controller, compared = self.controller, self.due or self._parts.reader is not None
        bounds = controller.min_batch, controller.max_batch
        return self._fit_plan(controller.decision.batch_size, *bounds, compared=compared)

    def limit_batch(self) -> None:
        """Bounds the batch by the data set, if its size is known."""
        samples = self._batches.samples
        if samples is not None and samples >= self.controller.given_min_batch:
            self.controller.limit(max_batch=samples)

    def is_complete(self, samples: int) -> bool:
        """Whether a step of so many samples was as large as planned, or a whole pass."""
        return self._batches.is_complete(samples, self.plan)

    @property
    def unmeasured(self) -> str:
        """Why the present step does not decide if it is not measured."""
        if self._parts.compares:  # two steps are compared, and it is the first
            return "not measured yet; the next step is compared with this one"
        return f"not measured; one step in {self.every} is"

    def decide(
        self, step: StepStatistics, *, lr_decay: float | None, complete: bool, unmeasured: str
    ) -> Decision:
        """The decision on the next batch size; the present one if this step cannot decide."""
        controller, past = self.controller, self._past
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
            if self._parts.warns and (note := note_of(decision.reason)):
                warn_in_loop(note)
            return decision
        return self._keep(present.batch_size, reason, present.lr_factor)

    def end_step(self, step: StepStatistics, *, complete: bool) -> None:
        """Counts a step; the next one is measured if it is due."""
        decides = step.finite and complete and (step.statistics is not None or not self.due)
        pairs = self._parts.pairs
        if pairs is not None and not step.finite:
            pairs.forget()
        was_measured = self._is_nth if pairs is None else self.due
        self.start(self._parts.meter.step + 1, again=was_measured and not decides)

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks."""
        return {"controller": self.controller.state_dict(), "measures_again": self.again}
