"""What the Trainer takes for one batch: a whole update; and for its loader: the passes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step import Step


class EpochLoader:
    """One pass over the data for every epoch of the Trainer.

    Args:
        train: what gives the steps.
        resumed: whether the first pass was begun before, and may be over already.
    """

    def __init__(self, train: AdaptiveBatch, *, resumed: bool) -> None:
        self._train, self._resumed = train, resumed

    def __iter__(self) -> Iterator[Step]:
        given = False
        for step in self._train:
            given = True
            yield step
        if self._resumed and not given:
            yield from self._train
        self._resumed = False


class StepBatch(dict[str, Any]):
    """A step, holding what the Trainer counts of a batch once its micro-batches are done.

    Args:
        step: its micro-batches.
        main: name of the input whose numbers are tokens.
        kept: whether the tokens themselves are looked at, not their number alone.
    """

    def __init__(self, step: Step, main: str, *, kept: bool) -> None:
        super().__init__()
        self.step = step
        self._names = (main, "attention_mask") if kept else (main,)
        self._kept = kept

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Another micro-batch."""
        for name in self._names:
            if isinstance(given := inputs.get(name), Tensor):
                more = given.flatten() if self._kept else torch.empty(given.numel(), device="meta")
                self[name] = torch.cat([self[name], more]) if name in self else more


class BackwardOutsideStep:
    """An accelerator for one micro-batch: all as it is, but for `backward`.

    Args:
        accelerator: the Trainer's.
        backward: takes the mean loss.
    """

    def __init__(self, accelerator: Any, backward: Callable[[Tensor], None]) -> None:
        self._accelerator, self._backward = accelerator, backward

    def backward(self, loss: Tensor) -> None:
        """Of the micro-batch."""
        self._backward(loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def count_labels(inputs: Mapping[str, Any], *, shifted: bool) -> int | None:
    """Labels that a loss is the mean over: those that are not -100; None where there are none.

    Args:
        inputs: of a micro-batch.
        shifted: whether each position is to predict the next one's, so that the first is not.
    Example:
        >>> count_labels({"labels": torch.tensor([[7, -100, 8], [9, 9, -100]])}, shifted=True)
        2
    """
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor):
        return None
    if shifted and "shift_labels" not in inputs:
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum())
