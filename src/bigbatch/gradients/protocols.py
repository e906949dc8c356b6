"""The one door for gradients.

A source knows how gradients come about (plain tensors, DDP, FSDP2) and tells its subscribers.
One step is

    begin(), then per micro-batch: micro_batch(weight), gradient(p, h) ... , end()

`h` is what this micro-batch adds to `p.grad` on this rank, before ranks are joined: c * weight *
(its mean gradient), with one constant c for the whole step. A parameter that a micro-batch does
not reach emits nothing; one that it reaches emits once. It may be held until end(), and is part of
no graph. Nothing here says that a micro-batch is one backward.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from bigbatch.gradients.shard_indices import Held


class Subscriber(Protocol):
    """Whoever wants to see each micro-batch's gradient once, before it is summed away."""

    def begin(self) -> None:
        """A step starts; what was gathered before is void."""

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts; `weight` is its n_d, 1.0 where it is not known."""

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """What the present micro-batch adds to `parameter.grad`, whole, on this rank."""

    def end(self) -> None:
        """The present micro-batch is complete."""


class GradientSource(Protocol):
    """How gradients come about, and whether what is read from them can be trusted."""

    parameters: list[Tensor]
    """Every parameter that is watched, each once."""
    micro_batches: int
    """Complete micro-batches since the step began, on this rank."""
    explicit: bool
    """Whether only what happens inside `micro_batch` is counted."""
    foreign_backward: bool
    """Whether a backward that was not counted changed `.grad` since the last micro-batch."""
    rank: int
    """Of this process among those that share the step."""
    ranks: int
    """How many processes share the step."""
    lockstep: bool
    """Whether the ranks must do equally many backwards in a step."""

    joined: bool
    """Whether a micro-batch is that of all ranks together, and not this rank's."""

    @property
    def replicas(self) -> int:
        """How many ranks hold the same `local` piece of every gradient."""

    @property
    def layout(self) -> int:
        """How often it was settled again which rank holds which piece."""

    def behind(self, trained: list[Tensor]) -> list[Tensor]:
        """The parameters of the model that an optimizer trains, which may hold others for them."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the whole gradient, also where the parameter is not whole at present."""

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watch more parameters; between steps."""

    def select(self, parameters: Iterable[Tensor]) -> None:
        """Watch these alone, between steps; others that are known are zeroed with them, only."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of every step from now on; between steps."""

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop telling `subscriber`; with nobody left to tell, no hook stays on."""

    def micro_batch(
        self, weight: float = 1.0, *, whole: bool = False
    ) -> AbstractContextManager[None]:
        """Whatever is computed inside belongs to one micro-batch of this weight.

        `whole` allows any number of backwards in it, for one copy of the gradient.
        """

    def idle(self) -> AbstractContextManager[None]:
        """What is computed inside adds zeros: it only keeps this rank in step with the others."""

    def restart(self) -> None:
        """Forget the step: the next micro-batch is the first of a new one."""

    def zero_grad(self) -> None:
        """Empty the gradients and forget the step."""

    def scale(self, factor: float) -> None:
        """Multiply every gradient, as part of the step."""

    def stamp(self) -> None:
        """Accept the gradients as they are now, after a change that belongs to the step."""

    def require_unchanged(self, since: str) -> None:
        """Raise GradientError where no step is measured, or somebody wrote to a gradient."""

    def sum_of(self, parameter: Tensor) -> Tensor:
        """This rank's piece of the sum of what `parameter` got in the complete micro-batches.

        Not to be written to. It is right where `sums_intact`, and there during backwards too.
        """

    def absorb(self, parameter: Tensor) -> bool:
        """Whether a subscriber has to add the gradient it was given to `sum_of` itself.

        For one that reads and writes there anyway, so that autograd need not do so again. Asked in
        `gradient`, once; a yes is binding.
        """

    @property
    def sums_intact(self) -> bool:
        """Whether nothing was done to what `sum_of` gives since the last micro-batch."""

    def was_zeroed(self) -> bool:
        """Whether somebody zeroed every gradient since the last micro-batch."""

    def is_finite(self) -> bool:
        """Whether every gradient is; waits for the device."""

    def local(self, parameter: Tensor) -> Tensor | None:
        """This rank's piece of the gradient that the ranks have joined, at the end of a step.

        It is that of `.grad`, but where an optimizer has put something else there.
        """

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor shaped like the whole gradient of `parameter`."""

    def held(self, parameter: Tensor, count: int) -> Held:
        """Which of the first `count` elements of a whole gradient `local` holds; no big array."""

    def all_reduce(self, values: Tensor) -> None:
        """Sum `values` over the ranks, in place."""

    def synchronize(self, now: bool) -> None:
        """Whether the next backward joins the gradients of ranks; called before its forward."""

    def close(self) -> None:
        """See nothing from here on."""
