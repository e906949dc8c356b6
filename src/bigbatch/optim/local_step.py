"""Scales gradients by GSNR in `step()`: those of one process, or its shards under fully_shard."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.optim.apply_gsnr import AppliedGsnr, Layer, apply_gsnr, out_of_range
from bigbatch.optim.functional import ratio, share_out_of_range
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.sharding import all_reduce_of, local


class LocalStep:
    """Multiplies `.grad` by r, from the moments of the source's micro-batches."""

    def __init__(self, state: GsnrState) -> None:
        self._state = state

    def bind(self, source: GradientSource) -> list[Subscriber]:
        """The moments subscribe; in the next step they keep their own sums."""
        return [self._state.moments]

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Replaces g by r g, or by p_hat g with momentum.

        Raises:
            GradientError: fewer than two micro-batches, or a gradient that none of them computed.
        """
        moments, checks = self._state.moments, self._state.warnings
        if not source.micro_batches or moments.micro_batches < 2:
            source.require_no_step_in_backward()
            raise GradientError(
                f"{self._state.name} saw {source.micro_batches} backward() calls since "
                "zero_grad(), it needs at least 2 (k >= 8 is better): split the batch into "
                "micro-batches; under fully_shard a micro-batch counts where its gradient is "
                "reduced, so leave set_requires_gradient_sync on"
            )
        agree = checks.checks_agreement and self._all_agree()
        bad_layers = self._out_of_range() if checks.checks_range else []
        all_reached = all(map(moments.is_reached, self._state.vr_parameters))
        with torch.no_grad():
            layers = self._scale(all_reached=all_reached)
        return AppliedGsnr(moments.micro_batches, layers, agree, bad_layers)

    def _all_agree(self) -> bool:
        """Whether there are gradients, and every element is the same in all micro-batches."""
        agree, moments = False, self._state.moments
        for parameter in filter(moments.is_reached, self._state.vr_parameters):
            total, m2 = moments.sum_and_m2(parameter)
            q = ratio(total, m2, moments.weight)
            if (q.isfinite() | ~total.isfinite()).any():
                return False
            agree = agree or bool(q.isinf().any())
        return agree

    def _out_of_range(self) -> list[Tensor]:
        moments = self._state.moments
        reached = filter(moments.is_reached, self._state.vr_parameters)
        return out_of_range(
            [(p, share_out_of_range(*moments.sum_and_m2(p), moments.weight)) for p in reached]
        )

    def _scale(self, *, all_reached: bool) -> dict[Tensor, Tensor]:
        moments, parts = self._state.moments, []
        for group in self._state.base.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None and group["vr"]]
            parts.append((group, parameters, all_reduce_of(parameters)))
        for p in () if all_reached else chain.from_iterable(part[1] for part in parts):
            if not moments.is_reached(p) and local(p.grad).any():
                raise GradientError(
                    "a parameter has a gradient that no counted backward gave it; let every "
                    "gradient come from backward() after zero_grad()"
                )
        layers: dict[Tensor, Tensor] = {}  # no error is raised after this line
        for group, parameters, all_reduce in parts:
            options = self._state.options(group, moments.weight)
            rows = apply_gsnr(options, [self._layer(p, group) for p in parameters], all_reduce)
            if options.watch:
                if all_reduce is not None:
                    all_reduce(rows)
                layers.update(zip(parameters, rows, strict=True))
        return layers

    def _layer(self, parameter: Tensor, group: dict[str, Any]) -> Layer:
        gradient = local(parameter.grad)
        total, m2 = self._state.moments.sum_and_m2(parameter, gradient)
        if group["beta3"] is None:
            return Layer(total, m2, gradient)
        return Layer(total, m2, gradient, *self._state.momentum.next(parameter, group["beta3"]))
