"""The two halves of an update in the Trainer: the optimizer's step, then the scheduler's."""

from contextlib import ExitStack
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from bigbatch.training.step import Step


class SplitStep:
    """The end of a step in two calls.

    Between them the gradients are not zeroed yet, and the learning rates are those of the batch,
    which the Trainer logs.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # the step whose micro-batches are complete
        self._second_half = ExitStack()

    def first(self) -> None:
        """Steps the optimizer."""
        assert self.step is not None
        with ExitStack() as stack:
            self.step.step_optimizer(stack.enter_context(self.step.optimizer_step()))
            self._second_half = stack.pop_all()

    def second(self) -> None:
        """Counts, advances the schedule, zeroes the gradients, plans the next step."""
        self.step = None
        self._second_half.close()

    def abort(self, error: BaseException) -> None:
        """Restores the learning rates after an exception, between the halves or elsewhere."""
        self.step = None
        self._second_half.__exit__(type(error), error, error.__traceback__)


class SplitOptimizer(AcceleratedOptimizer):
    """The Trainer's optimizer, whose step is the first half of an update.

    Args:
        prepared: the optimizer that accelerate has prepared.
        split_step: the end of the current step.
    """

    def __init__(self, prepared: Any, split_step: SplitStep) -> None:
        super().__init__(prepared.optimizer, device_placement=False, scaler=prepared.scaler)
        self.prepared = prepared
        self._split_step = split_step

    def step(self, closure: Any = None) -> None:
        """Runs the first half."""
        self._split_step.first()


class SplitScheduler:
    """The Trainer's scheduler, whose step is the second half of an update.

    Args:
        scheduler: the scheduler in base batches, which AdaptiveBatch advances.
        optimizer: the optimizer whose learning rates are reported.
        split_step: the end of the current step.
    """

    def __init__(self, scheduler: Any, optimizer: Any, split_step: SplitStep) -> None:
        self.scheduler = scheduler
        self._optimizer, self._split_step = optimizer, split_step

    def step(self) -> None:
        """Runs the second half."""
        self._split_step.second()

    def get_last_lr(self) -> list[float]:
        """Learning rates of the batch between the two halves, else those of the schedule."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
