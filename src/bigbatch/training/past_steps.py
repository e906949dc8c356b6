"""What the steps so far have left: counts, the last records, seconds, averages."""

import time
from typing import Any

from bigbatch.log.step_record import StepRecord
from bigbatch.policies.goodput import LossTrend
from bigbatch.policies.step_time import StepTimes
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.training.step_sums import StepStatistics


class PastSteps:
    """Counts the steps of a training, and keeps of them what decisions and states need."""

    def __init__(self, ranks: int, *, keeps_history: bool) -> None:
        self.epoch = self.samples = self.steps = self.skipped = 0
        self.record: StepRecord | None = None  # of the last step
        self.last_measured: StepRecord | None = None  # of the last measured step
        self.weight_per_sample: float | None = None  # in the last step that counted it
        self.step_seconds = 0.0  # of the last step, on this rank; 0 before the first
        self.step_times, self.loss_trend = StepTimes(ranks), LossTrend()
        self._noise = NoiseAverage(16, "steps")  # of measured steps, for a branch test
        self.keeps_history = keeps_history  # for a policy that reads times and losses
        self._timed: tuple[int, bool] | None = None  # the last step: its size, whether measured
        self._earlier_seconds = 0.0  # before the last resumption
        self._started = self.step_started = time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Time spent training, over all resumptions."""
        return self._earlier_seconds + time.perf_counter() - self._started

    @property
    def noise_scale(self) -> float:
        """B_simple averaged over 16 measured steps; nan before the first."""
        average = self._noise
        return GradientStatistics(average.grad_sqnorm, average.grad_variance, 1, 0).noise_scale

    def add(self, record: StepRecord, step: StepStatistics) -> None:
        """Adds a step, of which the host may not have read everything."""
        self.record, self.samples = record, record.samples
        if (measured := step.statistics) is not None:
            self.last_measured = record
            self._noise.add(measured)
        if self.keeps_history:
            self.loss_trend.add(step.samples, step.loss)
            if self._timed is not None:
                size, was_measured = self._timed
                self.step_times.add(size, step.previous_seconds, measured=was_measured)
            self._timed = step.samples, measured is not None

    def end_step(self) -> None:
        """The next step starts now."""
        now = time.perf_counter()
        self.step_seconds, self.step_started = now - self.step_started, now

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks."""
        return {
            "counts": [self.epoch, self.samples, self.steps, self.skipped],
            "weight_per_sample": self.weight_per_sample,
            "step_times": self.step_times.state(),
            "loss_trend": self.loss_trend.state(),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Continues from a saved state, and from the seconds of this rank, `own`."""
        self.epoch, self.samples, self.steps, self.skipped = map(int, state["counts"])
        weight = state["weight_per_sample"]
        self.weight_per_sample = None if weight is None else float(weight)
        self._earlier_seconds = float(own["elapsed_seconds"])
        self.step_seconds = float(own["step_seconds"])
        self._started = self.step_started = time.perf_counter()
        self.step_times.load(state["step_times"])
        self._timed = None
        self.loss_trend.load(state["loss_trend"])
        self._noise.load_state_dict(state["noise"])
