"""Per-element sum and centred second moment of the micro-batch gradients."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import FULL_PRECISION, sum_dtype
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.groups.group_tap import GroupGradients
from bigbatch.gradients.protocols import MicroBatchGradients, Subscriber
from bigbatch.kernels import native

_CHUNK = 1 << 16  # elements, of 256 KB in float32


@dataclass
class _Moment:
    """Moments of one parameter; undefined if the weight is 0."""

    m2: Tensor  # M2, shaped like the gradients
    total: Tensor | None = None  # S; None if the guard has it
    weight: float = 0.0  # of the micro-batches that the moments cover


class GradientMoments(Subscriber):
    """Subscriber of a source: sum and centred second moment of the micro-batch gradients.

    Per element, with S and W before micro-batch d (Welford, weighted):

        M2 += n_d W / (W + n_d) (g_d - S / W)^2;   S += n_d g_d;   W += n_d

    A micro-batch that does not reach a parameter has a gradient of 0 there, and counts as such.
    M2 is float32 at least. S is float32 at least, in a buffer of its own that no change of `.grad`
    affects. With `sum_guard`, the guard of a source whose sums are exactly S, S is its `grad_sum`
    instead, except for the parameters in `own_sum_parameters`.

    Source:
        Welford 1962, West 1979; why not E[g^2] - E[g]^2: docs/theory.md (5).
    """

    needs_exact_groups = True

    def __init__(self, watched: Collection[Tensor] | None = None, *, fused: bool = True) -> None:
        self.micro_batches = 0  # groups of one backward count as micro-batches
        self.weight = 0.0  # of all micro-batches, the current one included
        self.sum_guard: GradGuard | None = None  # assigned between steps only
        self.own_sum_parameters: set[Tensor] = set()  # assigned between steps only
        self._watched = watched
        self._fused = fused
        self._weight_before = 0.0  # weight of the complete micro-batches
        self._moments: dict[Tensor, _Moment] = {}  # kept for reuse

    def begin(self) -> None:
        """A step starts."""
        self.micro_batches = 0
        self.weight = self._weight_before = 0.0
        for moment in self._moments.values():
            moment.weight = 0.0

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch of n_d = weight starts."""
        self.micro_batches += groups
        self._weight_before = self.weight
        self.weight += weight

    reads_at_once = True

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Adds n_d g_d, which the micro-batch is about to add to `parameter.grad`."""
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            self.gradient(parameter, gradient)

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds one gradient."""
        if self._watched is not None and parameter not in self._watched:
            return
        moment = self._moment(parameter, gradient)
        if moment.weight == self.weight:
            raise GradientError(
                "a parameter received two gradients in one micro-batch (two backwards, or "
                "reentrant checkpointing); sum the losses and call backward once"
            )
        gradient = _with_strides_of(gradient, moment.m2)
        if moment.weight:
            self._add(parameter, moment, gradient)
        else:
            self._start(parameter, moment, gradient)
        moment.weight = self.weight

    @torch.no_grad()
    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Adds the scatter of the groups of one backward around their mean.

        M2 += sum_d n_d (g_d - g)^2,    with n_d g_d = h_d and (sum n_d) g = sum h_d
        """
        moment = self._moments.get(parameter)
        if moment is None or moment.weight != self.weight:  # not watched
            return
        weights = groups.weights
        mean = gradient.to(groups.gradients.dtype)
        for images, weight in zip(groups.gradients, weights, strict=True):
            if weight:
                deviation = torch.sub(images, mean, alpha=weight / sum(weights))
                scale = (self.weight - self._weight_before) / sum(weights)
                moment.m2.addcmul_(deviation, deviation, value=1 / (weight * scale))

    def is_reached(self, parameter: Tensor) -> bool:
        """Whether any micro-batch of the step reached the parameter."""
        return self.reached_and_own_sum(parameter)[0]

    def reached_and_own_sum(self, parameter: Tensor) -> tuple[bool, Tensor | None]:
        """(whether a micro-batch reached the parameter, its S if that has its own buffer)."""
        moment = self._moments.get(parameter)
        return (False, None) if moment is None else (moment.weight > 0, moment.total)

    def sum_and_m2(
        self, parameter: Tensor, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(S, M2) over the whole step; zeros if no micro-batch reached the parameter."""
        moment = self._moments.get(parameter)
        if moment is None or not moment.weight:
            m2 = self._moment(parameter, gradient).m2.zero_()
            return torch.zeros_like(m2), m2
        total = self._sum(parameter, moment)
        self._catch_up(moment, total, self.weight)
        return total, moment.m2

    def _start(self, parameter: Tensor, moment: _Moment, gradient: Tensor) -> None:
        """Takes the first gradient of a step; it was 0 in the micro-batches before."""
        moment.m2.zero_()
        if self._weight_before:
            share = self._weight_before / ((self.weight - self._weight_before) * self.weight)
            moment.m2.addcmul_(gradient, gradient, value=share)
        if (
            self.sum_guard
            and gradient.dtype in FULL_PRECISION
            and parameter not in self.own_sum_parameters
        ):
            moment.total = None
        elif moment.total is None:
            moment.total = gradient.to(moment.m2.dtype, copy=True)
        else:
            moment.total.copy_(gradient)

    def _add(self, parameter: Tensor, moment: _Moment, gradient: Tensor) -> None:
        """Takes a further gradient of a step."""
        stored = self._sum(parameter, moment)
        total = _with_strides_of(stored, moment.m2)
        self._catch_up(moment, total, self._weight_before)
        weight, adds = self.weight - self._weight_before, moment.total is not None
        if self.sum_guard is not None and not adds and total is stored and total.is_cpu:
            # one pass updates S and M2; GPUs need several passes anyway
            adds = False
        before = self._weight_before
        _welford(gradient, weight, total, moment.m2, before, fused=self._fused, adds=adds)

    def _moment(self, parameter: Tensor, gradient: Tensor | None) -> _Moment:
        moment = self._moments.get(parameter)
        if moment is None or (gradient is not None and gradient.shape != moment.m2.shape):
            like = parameter if gradient is None else gradient
            m2 = torch.empty_like(like, dtype=sum_dtype(like.dtype), requires_grad=False)
            moment = self._moments[parameter] = _Moment(m2)
        return moment

    def _sum(self, parameter: Tensor, moment: _Moment) -> Tensor:
        """S, in its own buffer or the guard's."""
        if moment.total is not None:
            return moment.total
        assert self.sum_guard is not None
        total = self.sum_guard.sum_of(parameter)
        assert total is not None
        return total

    def _catch_up(self, moment: _Moment, total: Tensor, weight: float) -> None:
        """Adds zero gradients for micro-batches since the last one that reached the parameter."""
        if moment.weight < weight:
            share = (weight - moment.weight) / (moment.weight * weight)
            moment.m2.addcmul_(total, total, value=share)
            moment.weight = weight


def combine_moments(
    totals: Iterable[Tensor],
    m2s: Iterable[Tensor],
    weights: Sequence[float],
    total: Tensor,
    m2: Tensor,
    *,
    fused: bool,
) -> None:
    """Writes S and M2 of the union of several groups of micro-batches, exactly.

        S = sum S_r;   M2 = sum M2_r + sum W_r (S_r / W_r - S / W)^2

    S and M2 are written to `total` and `m2`. A group of weight 0 is in S alone; without `m2s` all
    M2_r are 0.

    Source:
        Chan, Golub and LeVeque 1979.
    """
    total.zero_()
    m2.zero_()
    before = 0.0
    for row, weight in zip(totals, weights, strict=True):
        if weight and before:
            _welford(row.to(total.dtype), weight, total, m2, before, fused=fused, adds=True)
        else:
            total.add_(row)
        before += weight
    for group_m2 in m2s:
        m2.add_(group_m2)


def _with_strides_of(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with the strides of `like`, so that both have the same order in memory."""
    if gradient.stride() == like.stride() or (gradient.is_contiguous() and like.is_contiguous()):
        return gradient
    return torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)


def _welford(
    gradient: Tensor,
    weight: float,
    total: Tensor,
    m2: Tensor,
    before: float,
    *,
    fused: bool,
    adds: bool,
) -> None:
    """Adds a gradient to the M2 of micro-batches with total weight `before`, and to S if `adds`.

    Without the compiled kernel, torch runs in chunks that stay in a CPU's cache.
    """
    ratio, share = weight / before, before / (weight * (before + weight))
    if fused and native.fits(gradient, total, m2):
        native.welford(gradient, total, m2, ratio, share, adds=adds)
        return
    is_whole = total.device.type != "cpu" or not total.is_contiguous()
    arrays = (gradient, total, m2)
    chunks = [[x] if is_whole else torch.split(x.view(-1), _CHUNK) for x in arrays]
    for g, s, m in zip(*chunks, strict=True):
        deviation = torch.sub(g, s, alpha=ratio)
        m.addcmul_(deviation, deviation, value=share)
        if adds:
            s.add_(g)
