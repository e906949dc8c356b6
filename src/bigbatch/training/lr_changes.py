"""Learning rates that change between two updates, where no scheduler is known."""

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.training.lr_scaling import times_written


class LRChanges:
    """Says once that a schedule of somebody else's counts updates, whose number is not known.

    What is set between two passes (a schedule of epochs, a plateau after validation) is the
    user's own affair, and so is what comes with a loaded state, whose groups are new ones.

    Args:
        optimizer: whose rates.
        warns: whether this rank warns.
    """

    def __init__(self, optimizer: Optimizer, *, warns: bool) -> None:
        self._optimizer, self._warns = optimizer, warns
        self._left: list[tuple[dict[str, Any], Any, int]] = []  # group, rate, how often written to
        self._epoch = 0  # of the update that left them

    def note(self, epoch: int) -> None:
        """An update has ended, in a pass of this number."""
        groups = self._optimizer.param_groups
        self._left = [(group, group.get("lr"), times_written(group.get("lr"))) for group in groups]
        self._epoch = epoch

    def examine(self, epoch: int) -> None:
        """Another update begins, and no scheduler is known."""
        if not self._warns or epoch != self._epoch:
            return
        now = {id(group): number for number, group in enumerate(self._optimizer.param_groups)}
        for group, rate, writes in self._left:
            other = group.get("lr")
            if id(group) in now and (times_written(other) != writes or not _same(rate, other)):
                self._warns = False
                warnings.warn(_changed(now[id(group)], rate, other), stacklevel=5)
                return


def _same(rate: Any, other: Any) -> bool:
    """Without a wait: of a tensor, its writes were compared."""
    if isinstance(rate, Tensor) or isinstance(other, Tensor):
        return rate is other
    return bool(rate == other)


def _changed(number: int, rate: Any, other: Any) -> str:
    numbers = not (isinstance(rate, Tensor) or isinstance(other, Tensor))
    what = f" from {rate:.6g} to {other:.6g}" if numbers else ""
    return (
        f"the learning rate of parameter group {number} was changed{what} between two updates, "
        "and no scheduler is known: a schedule that counts updates ends in the wrong place, since "
        "their number follows the batch size. Pass AdaptiveBatch(scheduler=scheduler) (to a "
        "trainer, as its own), which advances it once per base batch of samples, and leave "
        "scheduler.step() out. Where you have set the rate by hand, it is as you set it"
    )
