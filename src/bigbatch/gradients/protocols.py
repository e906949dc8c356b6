"""What reads micro-batch gradients, and the three parts of a gradient source.

One step of a source is

    begin(), then per micro-batch: micro_batch(weight), gradient(p, h) ... , end()

`h` is what this micro-batch adds to `p.grad` on this rank, before ranks are reduced: c * weight *
(its mean gradient), with one constant c for the whole step. A parameter that a micro-batch does
not reach emits nothing; one that it reaches emits once. The tensor may be kept until end(), and has
no graph. A micro-batch may be one backward or several.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

OnGradient = Callable[[Tensor, Tensor], None]
"""Called with a parameter and what a backward adds to its gradient."""


class Subscriber(Protocol):
    """Reads each micro-batch's gradient once, before it is summed into `.grad`."""

    def begin(self) -> None:
        """A step starts; discard what the previous one left."""

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts; `weight` is its n_d, 1.0 where it is unknown."""

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """What the current micro-batch adds to `parameter.grad`, whole, on this rank."""

    def end(self) -> None:
        """The current micro-batch is complete."""


class GradientTap(Protocol):
    """Puts hooks where an engine computes gradients, and reports what they see."""

    on_leaves: bool
    """Whether the hooks are on the parameters themselves, so that one shows any backward."""

    def require_supported(self, parameter: Tensor) -> None:
        """Raises SettingError for a parameter whose gradient cannot be seen."""

    def attach(self, parameters: Iterable[Tensor], report: OnGradient) -> None:
        """Hooks those that require a gradient and have no hook yet."""

    def detach(self, parameter: Tensor) -> None:
        """Removes the hook of one parameter."""

    def close(self) -> None:
        """Removes every hook."""

    def is_hooked(self, parameter: Tensor) -> bool:
        """Whether its gradients are reported."""
