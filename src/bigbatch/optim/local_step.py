"""The fold in `step()`, of gradients that this process has whole, or has its pieces of."""

from collections.abc import KeysView
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.optim.apply_gsnr import AppliedGsnr, Layer, Rule, apply_gsnr, out_of_range
from bigbatch.optim.functional import ratio, share_out_of_range
from bigbatch.optim.grad_aliasing import GradAliasing
from bigbatch.optim.sharding import join_of, local


class LocalStep:
    """Folds a rule's r into `.grad`, by the moments that its source's micro-batches left.

    Args:
        rule: the optimizer.
        scaled: its parameters in groups with vr, as they are now.
    """

    def __init__(self, rule: Rule, scaled: KeysView[Tensor]) -> None:
        self.borrowed = GradAliasing(rule.moments)
        self._rule, self._scaled = rule, scaled

    def apply_gsnr(self, source: GradientSource, *, asks: bool) -> AppliedGsnr:
        """Puts r g, or p_hat g, where g was.

        Args:
            source: of the micro-batches since `zero_grad()`.
            asks: whether to look if they all agree, which waits for the device.
        Raises:
            GradientError: fewer than two of them, or a gradient that none of them gave.
        """
        moments = self._rule.moments
        if source.micro_batches < 2:
            raise GradientError(
                f"{type(self._rule).__name__} saw {source.micro_batches} backward() calls since "
                "zero_grad(), it needs at least 2 (k >= 8 is better): split the batch into "
                "micro-batches; under fully_shard a micro-batch counts where its gradient is "
                "reduced, so leave set_requires_gradient_sync on"
            )
        agree = asks and self._all_agree()
        lost = self._out_of_range() if self._rule.asks else []
        all_reached = self.borrowed.check(source, self._scaled)
        with torch.no_grad():
            told = self._fold(all_reached=all_reached)
        self.borrowed.renew(source, self._scaled)
        return AppliedGsnr(moments.micro_batches, told, agree, lost)

    def _all_agree(self) -> bool:
        """Whether there are gradients and none of their elements varied."""
        agree, moments = False, self._rule.moments
        for parameter in filter(moments.reached, self._scaled):
            total, m2 = moments.of(parameter)
            q = ratio(total, m2, moments.weight)
            if (q.isfinite() | ~total.isfinite()).any():
                return False
            agree = agree or bool(q.isinf().any())
        return agree

    def _out_of_range(self) -> list[Tensor]:
        moments = self._rule.moments
        reached = [p for p in self._scaled if moments.reached(p)]
        shares = [share_out_of_range(*moments.of(p), moments.weight) for p in reached]
        return out_of_range(reached, shares)

    def _fold(self, *, all_reached: bool) -> dict[Tensor, Tensor]:
        groups, moments = self._rule.param_groups, self._rule.moments
        chosen = [
            [p for p in group["params"] if p.grad is not None and group["vr"]] for group in groups
        ]
        joins = [join_of(parameters) for parameters in chosen]
        for parameter in () if all_reached else chain.from_iterable(chosen):
            self._require_counted(parameter)
        told: dict[Tensor, Tensor] = {}  # nothing is refused from here on
        for group, parameters, join in zip(groups, chosen, joins, strict=True):
            how = self._rule.how(group, moments.weight, moments.micro_batches)
            rows = apply_gsnr(how, [self._layer(p, group) for p in parameters], join)
            if how.watch:
                if join is not None:
                    join(rows)
                told.update(zip(parameters, rows, strict=True))
        return told

    def _require_counted(self, parameter: Tensor) -> None:
        if not self._rule.moments.reached(parameter) and local(parameter.grad).any():
            raise GradientError(
                "a parameter has a gradient that no counted backward gave it; let every gradient "
                "come from backward() after zero_grad()"
            )

    def _layer(self, parameter: Tensor, group: dict[str, Any]) -> Layer:
        gradient = local(parameter.grad)
        total, m2 = self._rule.moments.of(parameter, gradient)
        if group["beta3"] is None:
            return Layer(total, m2, gradient)
        return Layer(total, m2, gradient, *self._rule.averages.next(parameter, group["beta3"]))
