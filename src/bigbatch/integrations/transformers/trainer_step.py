"""An update of the Trainer as a step: its loader, its batch, its optimizer and its scheduler."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import Tensor

from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step import Step


class EpochLoader:
    """Iterates over the steps of one pass for every epoch of the Trainer."""

    def __init__(self, train: AdaptiveBatch, *, resumed: bool) -> None:
        self._train, self._resumed = train, resumed

    def __iter__(self) -> Iterator[Step]:
        is_empty = True
        for step in self._train:
            is_empty = False
            yield step
        if self._resumed and is_empty:
            yield from self._train
        self._resumed = False


class StepBatch(dict[str, Any]):
    """A step with the inputs that the Trainer counts, which its micro-batches add."""

    def __init__(self, step: Step, main_input: str, *, keep_values: bool) -> None:
        super().__init__()
        self.step = step
        self._names = (main_input, "attention_mask") if keep_values else (main_input,)
        self._keep_values = keep_values

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Adds the inputs of a micro-batch."""
        for name in self._names:
            if isinstance(values := inputs.get(name), Tensor):
                size = values.numel()
                flat = values.flatten() if self._keep_values else torch.empty(size, device="meta")
                self[name] = torch.cat([self[name], flat]) if name in self else flat


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
    """The Trainer's optimizer, whose step is the first half of an update."""

    def __init__(self, prepared: Any, split_step: SplitStep) -> None:
        super().__init__(prepared.optimizer, device_placement=False, scaler=prepared.scaler)
        self.prepared = prepared
        if isinstance(prepared, DeepSpeedOptimizerWrapper):
            prepared.__has_overflow__ = False  # or a skipped step would lack its second half
        self._split_step = split_step

    def step(self, closure: Any = None) -> None:
        """Runs the first half."""
        self._split_step.first()


class SplitScheduler:
    """The Trainer's scheduler, whose step is the second half of an update."""

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


def count_labels(inputs: Mapping[str, Any], *, shifted: bool) -> Tensor | None:
    """Number of labels of each sample, all except -100, that a loss is the mean over; (B,).

    None without labels.

    Args:
        inputs: the inputs of a micro-batch.
        shifted: whether each position predicts the next label, so that the first does not count.
    Example:
        >>> count_labels({"labels": torch.tensor([[7, 9, 8], [9, 9, -100]])}, shifted=True)
        tensor([2, 1])
    """
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return None
    if shifted and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    return labels.ne(-100).reshape(len(labels), -1).sum(1)
