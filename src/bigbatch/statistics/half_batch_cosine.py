"""SimiGrad's own signal, for comparison: the exact cosine of two half-batch gradients."""

import math

import torch
from torch import Tensor

from bigbatch.gradients import GradientSource, GroupGradients, MicroBatchGradients, Subscriber
from bigbatch.gradients.dtypes import stack_scalars, sum_dtype
from bigbatch.statistics.norms import squared_norm

_MIN_PRODUCT = 2e-3  # about twice the ratio of the shorter half to the longer


class HalfBatchCosine(Subscriber):
    """Subscriber of a source: Z = sum of e_d h_d, e_d = +1 or -1 by the parity of rank + d.

    With G = sum of h_d, the gradients of the halves are (G + Z) / 2 and (G - Z) / 2, so

        cosine = (|G|^2 - |Z|^2) / sqrt((|G|^2 + |Z|^2)^2 - 4 (G . Z)^2)

    If the number of micro-batches is odd, one half has one more.

    Source:
        SimiGrad (Qin et al., NeurIPS 2021); the signed sum: docs/theory.md (8).
    """

    needs_exact_groups = True

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._signed_sums: dict[Tensor, Tensor] = {}
        self._first = self._groups = 0  # rank + d of the current micro-batch, or its first group

    def begin(self) -> None:
        """A step starts."""
        self._signed_sums.clear()
        self._first, self._groups = self._source.rank, 0

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        self._first += self._groups
        self._groups = groups

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Adds e_d h_d, unless the groups follow."""
        if self._groups == 1:
            for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
                self._signed_sum(parameter).add_(gradient, alpha=(-1) ** self._first)

    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Adds e_d h_d of each group."""
        for number, group in enumerate(groups.gradients, self._first):
            self._signed_sum(parameter).add_(group, alpha=(-1) ** number)

    def _signed_sum(self, parameter: Tensor) -> Tensor:
        """Z of one parameter on this rank; zeros where no micro-batch reached it."""
        if parameter not in self._signed_sums:
            shape, dtype = self._source.reducer.shape(parameter), sum_dtype(parameter.dtype)
            zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
            self._signed_sums[parameter] = zeros
        return self._signed_sums[parameter]

    def dots(self) -> Tensor:
        """|Z|^2 and G . Z of this rank's shards, Z being summed over the ranks; communicates."""
        products: list[Tensor] = []
        reducer = self._source.reducer
        for parameter in (p for p in self._source.parameters if p.requires_grad):
            grad, signed_sum = self._source.local_grad(parameter), self._signed_sum(parameter)
            reducer.sum_gradient(signed_sum)
            shard = reducer.shards.shard(parameter, signed_sum).reshape(-1)
            flat = shard.new_zeros(len(shard)) if grad is None else grad.reshape(-1).to(shard)
            products += [squared_norm(shard), shard.dot(flat)]
        return stack_scalars(products).view(-1, 2).sum(0)


def cosine_of_halves(total_sqnorm: float, signed_sqnorm: float, dot: float) -> float:
    """The cosine from |G|^2, |Z|^2 and G . Z; nan if one half is nothing but rounding."""
    norms_product = math.sqrt(max(0.0, (total_sqnorm + signed_sqnorm) ** 2 - 4 * dot**2))
    if not norms_product > _MIN_PRODUCT * (total_sqnorm + signed_sqnorm):
        return math.nan
    return min(max((total_sqnorm - signed_sqnorm) / norms_product, -1.0), 1.0)
