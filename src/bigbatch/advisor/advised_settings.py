"""What a program asks for whose batch size or learning rates a trial cannot change by itself."""

import os

from bigbatch.setting_types import Count, Positive, checked

BATCH_FACTOR, LR_FACTOR = "BIGBATCH_BATCH_FACTOR", "BIGBATCH_LR_FACTOR"  # in the environment
ASKED = set[str]()  # those that this program has asked for


@checked
def advised_batch_size(default: Count) -> int:
    """The batch size of a trial of `bigbatch advise --try`; elsewhere the default.

        round(default x tried batch / present batch), at least 1

    Use it where a program makes its batches without a DataLoader. Every size that belongs to a
    batch, of all ranks or of a micro-batch, is scaled by the same factor.

    Args:
        default: the program's own batch size.

    Example:
        >>> advised_batch_size(32)
        32
    """
    return max(1, round(default * factor(BATCH_FACTOR)))


@checked
def advised_lr(default: Positive) -> float:
    """The learning rate of a trial of `bigbatch advise --try`; elsewhere the default.

    A trial scales the `lr` of every parameter group at each step by itself, and no longer does
    once this was called. Use it where an optimizer has its rate elsewhere.

    Args:
        default: the program's own rate.

    Example:
        >>> advised_lr(0.1)
        0.1
    """
    return default * factor(LR_FACTOR)


def factor(name: str) -> float:
    """A factor of the environment; 1 if there is none."""
    ASKED.add(name)
    return float(os.environ.get(name, "1"))
