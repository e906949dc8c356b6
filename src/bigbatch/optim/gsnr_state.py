"""Moments, momentum, options and warnings of a variance-reduced optimizer, for any scaling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.apply_gsnr import AppliedGsnr
from bigbatch.optim.gsnr_momentum import GsnrMomentum
from bigbatch.statistics.second_moment import GradientMoments, SumsOf

_RANGE_INTERVAL = 16  # steps; on a GPU a check waits for the device
_RECOMMENDED_K = 8  # with fewer, the ratio's variance is infinite or nearly so


@dataclass(eq=False)
class GsnrState:
    """The state of one variance-reduced optimizer."""

    base: Optimizer  # the base optimizer, whose groups have gamma, r_max, beta3 and vr
    name: str  # the name of the optimizer, for messages
    # watch, fused: see `VarianceReduced`
    watch: bool
    fused: bool | None
    # the parameters of the groups with vr, in order
    vr_parameters: dict[Tensor, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses_kernels = self.fused is not False  # where they fit
        self.momentum = GsnrMomentum()
        self.moments = GradientMoments(self.vr_parameters.keys(), fused=self.uses_kernels)
        self.warnings = GsnrWarnings()
        # S of parameters, of the source that the moments are of
        self.sums_of: SumsOf = lambda parameters: [None] * len(parameters)

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


class GradientScaling(Protocol):
    """Multiplies gradients by r at one point of a step: in `step()`, or inside the all-reduce."""

    def apply(self, source: GradientSource, *, may_step: bool = False) -> AppliedGsnr:
        """Replaces g by r g, or by p_hat g with momentum; once a step.

        With `may_step` it may do the base optimizer's step too, and says so.
        """


class GsnrWarnings:
    """Warns if micro-batches all agree, if they are few, or if their M2 is out of range."""

    def __init__(self) -> None:
        self._steps = 0
        self._warned_of_range = False

    @property
    def checks_agreement(self) -> bool:
        """Whether this step checks if all gradients agree, which waits for the device."""
        return not self._steps

    @property
    def checks_range(self) -> bool:
        """Whether this step checks the range of M2, which waits for the device."""
        return self._steps % _RANGE_INTERVAL == 0 and not self._warned_of_range

    def warn(
        self, applied: AppliedGsnr, named_parameters: Callable[[], list[tuple[str, Tensor]]]
    ) -> None:
        """Gives the warnings of a step that were not given before."""
        if not self._steps and applied.agree and not applied.out_of_range:
            warn_in_loop(
                "every micro-batch has the same gradient, so r says nothing; is it the same "
                "data, or a gradient that was averaged already?"
            )
        if not self._steps and applied.k < _RECOMMENDED_K:
            warn_in_loop(
                f"k = {applied.k} micro-batches give a poor signal-to-noise ratio: pure noise has "
                f"a mean ratio of 1 / (k - 3); use k >= {_RECOMMENDED_K}"
            )
        if applied.out_of_range and not self._warned_of_range:
            self._warned_of_range = True
            warn_in_loop(_out_of_range(applied.out_of_range, named_parameters()))
        self._steps += 1


def _out_of_range(layers: Sequence[Tensor], named_parameters: list[tuple[str, Tensor]]) -> str:
    name = next(name for name, p in named_parameters if p is layers[0])
    dtype = sum_dtype(layers[0].dtype)
    low, high = math.sqrt(torch.finfo(dtype).tiny), math.sqrt(torch.finfo(dtype).max)
    return (
        f"r is not right for {len(set(layers))} layers, {name!r} the first: their micro-batch "
        f"gradients differ by less than {low:.0e} or more than {high:.0e}, and the squares of "
        f"the differences leave {dtype}'s range; multiply the loss by a constant, as a GradScaler "
        "does: r does not change with it"
    )
