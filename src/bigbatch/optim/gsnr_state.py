"""Moments, momentum and options of a variance-reduced optimizer: what scaling a gradient needs."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.optim.apply_gsnr import AppliedGsnr, GsnrOptions
from bigbatch.optim.gsnr_momentum import GsnrMomentum
from bigbatch.optim.gsnr_warnings import GsnrWarnings
from bigbatch.statistics.second_moment import GradientMoments


@dataclass(eq=False)
class GsnrState:
    """The state of one variance-reduced optimizer."""

    base: Optimizer  # the base optimizer, whose groups have gamma, r_max, beta3 and vr
    name: str  # the name of the optimizer, for messages
    # factor, watch, fused, compiled: see `VarianceReduced`
    factor: str
    watch: bool
    fused: bool | None
    compiled: bool
    # the parameters of the groups with vr, in order
    vr_parameters: dict[Tensor, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.momentum = GsnrMomentum()
        self.moments = GradientMoments(self.vr_parameters.keys(), fused=self.fused is not False)
        self.warnings = GsnrWarnings()

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in the order of the state dict."""
        return [parameter for group in self.base.param_groups for parameter in group["params"]]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters with their names, or with their numbers if the groups have no names."""
        named: list[tuple[str, Tensor]] = []
        for group in self.base.param_groups:
            parameters = group["params"]
            names = group.get("param_names", [""] * len(parameters))
            named += zip(names, parameters, strict=True)
        return [(name or str(number), p) for number, (name, p) in enumerate(named)]

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
    """Multiplies gradients by r at one point of a step: in `step()`, or inside the all-reduce."""

    def bind(self, source: GradientSource) -> list[Subscriber]:
        """Prepares for steps of this source; returns what has to subscribe to it."""

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Replaces g by r g, or by p_hat g with momentum; once a step."""
