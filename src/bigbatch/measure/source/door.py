"""The one door for gradients.

A source knows how gradients come about (plain tensors today) and tells its subscribers.
One step is

    begin(), then per micro-batch: micro_batch(weight), gradient(p, h) ... , then end()

`h` is what this micro-batch adds to `p.grad`: c * weight * (its mean gradient), with one constant
c for the whole step. `gradient` is called before h is added, so `p.grad` then holds the sum of
the micro-batches before it. A parameter that a micro-batch does not reach emits nothing.
"""

from typing import Protocol

from torch import Tensor


class Subscriber(Protocol):
    """Whoever wants to see each micro-batch's gradient once, before it is summed away."""

    def begin(self) -> None:
        """A step starts; what was gathered before is void."""

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts; `weight` is its n_d, 1.0 where it is not known."""

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """What the present micro-batch is about to add to `parameter.grad`."""

    def end(self) -> None:
        """The present micro-batch is complete."""


class GradientSource(Protocol):
    """How gradients come about, for those who read them."""

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is watched, each once."""

    @property
    def micro_batches(self) -> int:
        """Complete micro-batches since the step began."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of every step from the next one on."""

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop telling `subscriber`."""

    def restart(self) -> None:
        """Forget the step: the next micro-batch is the first of a new one."""
