"""The readers of micro-batch gradients.

One step of a source is

    begin(), then per backward: micro_batch(weight, groups), gradient(p, h) ... , end()

`h` is what this micro-batch adds to `p.grad` on this rank, before ranks are reduced: c * weight *
(its mean gradient), with one constant c for the whole step. A parameter that a micro-batch does
not reach emits nothing; one that it reaches emits once. The tensor may be kept until end(), and has
no graph. A micro-batch may be one backward or several. One backward may also be several groups of
samples: then groups(p, h, ...) follows each gradient(p, h), with what each group adds to h.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from bigbatch.gradients.groups.group_tap import GroupGradients

OnGradient = Callable[[Tensor, Tensor], None]
"""Called with a parameter and what a backward adds to its gradient."""


class Subscriber(Protocol):
    """Reads each micro-batch's gradient once, before it is summed into `.grad`.

    A subclass may leave out `gradient`, `groups` and `end`.
    """

    needs_exact_groups: bool = False
    """Whether `groups` must get the groups' gradients themselves, not random projections."""

    def begin(self) -> None:
        """A step starts; discard what the previous one left."""

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch of so many groups starts; `weight` is its n_d, 1.0 where it is unknown."""

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """The current micro-batch adds the full `gradient` to `parameter.grad` on this rank."""
        return

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """The groups of the current backward, which together add `gradient`."""
        return

    def end(self) -> None:
        """The current micro-batch is complete."""
        return
