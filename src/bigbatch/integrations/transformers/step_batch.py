"""The Trainer's loader and its batches: each batch is all micro-batches of an update."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step import Step


class EpochLoader:
    """Iterates over the steps of one pass for every epoch of the Trainer.

    Args:
        train: the AdaptiveBatch whose steps these are.
        resumed: whether the first pass is resumed from a checkpoint, and may be over already.
    """

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
    """A step with the inputs that the Trainer counts, which its micro-batches add.

    Args:
        step: the step whose micro-batches are trained on.
        main_input: name of the input that holds tokens.
        keep_values: whether to keep the tokens and the attention mask, and not only their number.
    """

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
