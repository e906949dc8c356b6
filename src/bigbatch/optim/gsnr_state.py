"""Moments, momentum and options of a variance-reduced optimizer: what scaling a gradient needs."""

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.optim.apply_gsnr import AppliedGsnr, GsnrOptions
from bigbatch.optim.gsnr_momentum import GsnrMomentum
from bigbatch.optim.gsnr_warnings import GsnrWarnings
from bigbatch.statistics.second_moment import GradientMoments


class GsnrState:
    """The state of one optimizer.

    Args:
        base: the base optimizer, whose groups have gamma, r_max, beta3 and vr.
        name: of the optimizer, for messages.
        factor: which r, a name of `functional.FACTORS`.
        watch: whether to keep what r did to each layer.
        fused: whether compiled kernels may be used; None: where they fit.
        compiled: whether `torch.compile` is given the rest.
    """

    def __init__(
        self,
        base: Optimizer,
        name: str,
        *,
        factor: str,
        watch: bool,
        fused: bool | None,
        compiled: bool,
    ) -> None:
        self.name, self.watch = name, watch
        self.factor, self.fused, self.compiled = factor, fused, compiled
        self.momentum = GsnrMomentum()
        self.scaled: dict[Tensor, None] = {}  # parameters of the groups with vr, in order
        self.moments = GradientMoments(self.scaled.keys(), fused=fused is not False)
        self.warnings = GsnrWarnings()
        self.base = base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's groups."""
        return self.base.param_groups

    def options(self, group: dict[str, Any], weight: float, k: int) -> GsnrOptions:
        """The options of a group, in a step of k micro-batches of this total weight."""
        return GsnrOptions(
            self.factor,
            group["gamma"],
            group["r_max"],
            group["beta3"] or 0.0,
            weight,
            k,
            self.watch,
            fused=self.fused is not False,
            compiled=self.compiled,
        )


class GradientScaling(Protocol):
    """Where in a step the gradients are multiplied by r."""

    def bind(self, source: GradientSource) -> list[Subscriber]:
        """Prepares for steps of this source; returns what has to subscribe to it."""

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Puts r g, or p_hat g with momentum, in the place of g; once a step."""
