"""The readers of micro-batch gradients.

One step of a source is

    begin(), then per micro-batch: micro_batch(weight, groups), gradients(batch) ... , end()

`h` is what this micro-batch adds to `p.grad` on this rank, before ranks are reduced: c * weight *
(its mean gradient), with one constant c for the whole step. A parameter that a micro-batch does
not reach has no h; one that it reaches has one. In a pipeline several micro-batches are open at a
time, and `number` says which one a call is of. A micro-batch may be one backward or several. One
backward may also be several groups of samples: then groups(p, h, ...) follows the gradients, with
what each group adds to h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bigbatch.gradients.groups.group_tap import GroupGradients


@dataclass(slots=True)
class MicroBatchGradients:
    """Gradients of one micro-batch: of all parameters that it reached, or of some of them."""

    parameters: Sequence[Tensor]  # the same list again where the same ones were reached
    gradients: Sequence[Tensor]  # h of each; dense, real, without a graph
    # S, what the micro-batches before added to each; None in the first, which becomes S without a
    # copy, and where the source keeps no sums
    sums: Sequence[Tensor] | None = None
    first: bool = False  # whether h becomes S
    may_sum: bool = False  # whether a subscriber may add h to S, in one pass with its own
    summed: bool = False  # set by the one that has done so


class Subscriber(Protocol):
    """Reads each micro-batch's gradient once, before it is summed into `.grad`.

    A subclass may leave out all but `begin`.
    """

    needs_exact_groups: bool = False
    """Whether `groups` must get the groups' gradients themselves, not random projections."""

    reads_at_once: bool = False
    """Whether an engine's gradients must come one by one, before the engine reduces them."""

    number: int = 0
    """The micro-batch that the next call is of, where several are open; a source sets it."""

    def begin(self) -> None:
        """A step starts; discard what the previous one left."""

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch of so many groups starts; `weight` is its n_d, 1.0 where it is unknown."""
        return

    def gradients(self, batch: MicroBatchGradients) -> None:
        """The current micro-batch adds these gradients to `.grad` on this rank."""
        return

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """The groups of the current backward, which together add `gradient`."""
        return

    def end(self) -> None:
        """The current micro-batch is complete."""
        return


class Engine(Protocol):
    """Runs the backwards and optimizer steps of a source whose gradients it keeps itself."""

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a micro-batch's weighted loss."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the mean gradient, at the latest in `step`; its norm before that."""

    def step(self, samples: int, *, finite: bool) -> None:
        """Steps the optimizer for a batch of so many samples; skips if it is not finite."""
