"""An update in two halves, as the Trainer makes it: the optimizer's step, then the scheduler's."""

from contextlib import ExitStack
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from bigbatch.training.step import Step


class SplitStep:
    """The end of the present step, called in two places.

    In between the gradients are still there, and learning rates are those of the batch, which
    the Trainer logs.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # whose micro-batches are all done
        self._rest = ExitStack()

    def first(self) -> None:
        """Steps the optimizer."""
        assert self.step is not None
        with ExitStack() as stack:
            self.step.step_optimizer(stack.enter_context(self.step.optimizer_step()))
            self._rest = stack.pop_all()

    def second(self) -> None:
        """Counts, advances the schedule, zeroes the gradients, plans the next step."""
        self.step = None
        self._rest.close()

    def leave(self, error: BaseException) -> None:
        """Where a training ends by an exception, in between or not: learning rates as before."""
        self.step = None
        self._rest.__exit__(type(error), error, error.__traceback__)


class SplitOptimizer(AcceleratedOptimizer):
    """The Trainer's optimizer, whose step is the first half of an update.

    Args:
        prepared: what accelerate made of it.
        halves: of the update.
    """

    def __init__(self, prepared: Any, halves: SplitStep) -> None:
        super().__init__(prepared.optimizer, device_placement=False, scaler=prepared.scaler)
        self.prepared = prepared
        self._halves = halves

    def step(self, closure: Any = None) -> None:
        """The first half."""
        self._halves.first()


class SplitScheduler:
    """The Trainer's scheduler, whose step is the second half of an update.

    Args:
        scheduler: that counts base batches; it is advanced elsewhere.
        optimizer: whose learning rates are reported.
        halves: of the update.
    """

    def __init__(self, scheduler: Any, optimizer: Any, halves: SplitStep) -> None:
        self.scheduler = scheduler
        self._optimizer, self._halves = optimizer, halves

    def step(self) -> None:
        """The second half."""
        self._halves.second()

    def get_last_lr(self) -> list[float]:
        """Those used, where an update is half done; else those that the schedule says."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scheduler's own."""
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
