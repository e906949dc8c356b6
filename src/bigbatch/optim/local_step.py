"""Scales gradients by GSNR in `step()`: those of one process, or its shards under fully_shard."""

import itertools
import operator

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.grad_guard import is_tensor
from bigbatch.gradients.grad_sums import GradSums
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.apply_gsnr import (
    AppliedGsnr,
    Layers,
    apply_gsnr,
    are_normal,
    out_of_range,
    shares_out_of_range,
)
from bigbatch.optim.base_step import GroupShare, OnePass
from bigbatch.optim.functional import ratio
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.sharding import all_reduce_of, local
from bigbatch.optim.two_pass import chunks

_GRAD = operator.attrgetter("grad")


class LocalStep:
    """Multiplies `.grad` by r, from the moments of the source's micro-batches."""

    def __init__(self, state: GsnrState) -> None:
        self._state = state
        self._one_pass = OnePass(state)

    def apply(self, source: GradientSource, *, may_step: bool = False) -> AppliedGsnr:
        """Raises GradientError for under two micro-batches, or a gradient of none of them."""
        self._prepare(source)
        state, moments = self._state, self._state.moments
        agree = state.checks_agreement and self._all_agree()
        bad_layers = self._out_of_range() if state.checks_range else []
        with torch.no_grad():
            shares = self._shares()
            for share in shares:  # no error from here on
                parameters, beta3 = share.parameters, share.group["beta3"]
                sums = moments.sums_and_m2s(parameters, state.sums_of, share.gradients)
                momentum = () if beta3 is None else state.momentum.next(parameters, beta3)
                share.layers = Layers(*sums, share.gradients, *momentum)
            calls = self._one_pass.find(shares) if may_step else None
            rows: dict[Tensor, Tensor] = {}
            for number, share in enumerate(shares):
                found = self._scale(share) if calls is None else calls[number]()
                if found is not None:
                    rows.update(zip(share.parameters, found, strict=True))
        return AppliedGsnr(moments.micro_batches, rows, agree, bad_layers, calls is not None)

    def _prepare(self, source: GradientSource) -> None:
        """Refuses a step without the micro-batches that r needs; warns of edited gradients."""
        source.require_finished()
        if not source.micro_batches or self._state.moments.micro_batches < 2:
            source.require_no_step_in_backward()
            raise GradientError(
                f"{self._state.name} saw {source.micro_batches} backward() calls since "
                "zero_grad(), it needs at least 2 (k >= 8 is better): split the batch into "
                "micro-batches; under fully_shard a micro-batch counts where its gradient is "
                "reduced, so leave set_requires_gradient_sync on"
            )
        if isinstance(source.guard, GradSums) and source.guard.settle():
            warn_in_loop(
                "gradients were changed between backward() and step(), which they were not at the "
                "last check; r of this step, and of earlier steps if they were changed through "
                ".data, may be that of the changed gradients"
            )

    def _all_agree(self) -> bool:
        """Whether there are gradients, and every element is the same in all micro-batches."""
        agree = False
        for chunk in chunks(self._reached()[1:]):
            total = chunk.flat(0)
            q = ratio(total, chunk.flat(1), self._state.moments.weight)
            if (q.isfinite() | ~total.isfinite()).any():
                return False
            agree = agree or bool(q.isinf().any())
        return agree

    def _out_of_range(self) -> list[Tensor]:
        reached, sums, m2s = self._reached()
        if are_normal(m2s):
            return []
        shares = shares_out_of_range(sums, m2s, self._state.moments.weight)
        return out_of_range(reached, [shares])

    def _reached(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The parameters that a micro-batch reached, S and M2 of each."""
        moments, parameters = self._state.moments, self._state.vr_parameters
        reached = list(itertools.compress(parameters, moments.are_reached(parameters)))
        return reached, *moments.sums_and_m2s(reached, self._state.sums_of)

    def _shares(self) -> list[GroupShare]:
        """The parameters of each group that have a gradient, which a micro-batch reached."""
        state, shares = self._state, []
        for group in state.base.param_groups:
            parameters, grads = group["params"], list(map(_GRAD, group["params"]))
            if not all(map(is_tensor, grads)):
                parameters = list(itertools.compress(parameters, map(is_tensor, grads)))
                grads = list(filter(is_tensor, grads))
            if not group["vr"] or not parameters:
                continue
            all_reduce = all_reduce_of(parameters)
            if all_reduce is not None:
                grads = list(map(local, grads))
            are_missed = map(operator.not_, state.moments.are_reached(parameters))
            if any(grad.any() for grad in itertools.compress(grads, are_missed)):
                raise GradientError(
                    "a parameter has a gradient that no counted backward gave it; let every "
                    "gradient come from backward() after zero_grad()"
                )
            shares.append(GroupShare(group, parameters, grads, all_reduce))
        return shares

    def _scale(self, share: GroupShare) -> Tensor | None:
        """Scales the gradients of a group; returns the row of each parameter, if watched."""
        state, all_reduce = self._state, share.all_reduce
        fused, watch, weight = state.uses_kernels, state.watch, state.moments.weight
        rows = apply_gsnr(share.layers, share.group, weight, all_reduce, fused=fused, watch=watch)
        if not watch:
            return None
        if all_reduce is not None:
            all_reduce(rows)
        return rows
