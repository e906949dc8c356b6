"""Per-element sum and centred second moment of the micro-batch gradients."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import FULL_PRECISION, sum_dtype
from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.protocols import Subscriber
from bigbatch.kernels import native

_CHUNK = 1 << 16  # elements, of 256 KB in float32


@dataclass
class _Moment:
    """Moments of one parameter over micro-batches of this weight; undefined where it is 0.

    S is `total`, or the guard's; both have the shape of the gradients.
    """

    m2: Tensor
    total: Tensor | None = None
    weight: float = 0.0


class GradientMoments(Subscriber):
    """Subscriber of a source: sum and centred second moment of the micro-batch gradients.

    Per element, with S and W before micro-batch d (Welford, weighted):

        M2 += n_d W / (W + n_d) (g_d - S / W)^2;   S += n_d g_d;   W += n_d

    A micro-batch that does not reach a parameter has a gradient of 0 there, and counts as such.
    M2 is float32 at least. So is S, in a buffer of its own that nothing done to `.grad` reaches;
    or it is the `grad_sum` of `sum_guard`, the guard of a source that is known to have S to the
    last bit; but not for the parameters in `own_sum_parameters`.

    Args:
        watched: the parameters to read, which may grow; None: all.
        fused: whether compiled kernels may be used.
    Source:
        Welford 1962, West 1979; why not E[g^2] - E[g]^2: docs/theory.md (5).
    """

    def __init__(self, watched: Collection[Tensor] | None = None, *, fused: bool = True) -> None:
        self.micro_batches = 0
        self.weight = 0.0  # of all micro-batches, the present one included
        self.sum_guard: GradGuard | None = None  # set between steps only
        self.own_sum_parameters: set[Tensor] = set()  # likewise
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

    def micro_batch(self, weight: float) -> None:
        """A micro-batch of n_d = weight starts."""
        self.micro_batches += 1
        self._weight_before = self.weight
        self.weight += weight

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Takes in n_d g_d, what the micro-batch is about to add to `parameter.grad`."""
        if self._watched is not None and parameter not in self._watched:
            return
        moment = self._moment(parameter, gradient)
        if moment.weight == self.weight:
            raise GradientError(
                "a parameter received two gradients in one micro-batch (two backwards, or "
                "reentrant checkpointing); sum the losses and call backward once"
            )
        gradient = _laid_out(gradient, moment.m2)
        if moment.weight:
            self._add(parameter, moment, gradient)
        else:
            self._start(parameter, moment, gradient)
        moment.weight = self.weight

    def is_reached(self, parameter: Tensor) -> bool:
        """Whether any micro-batch of the step reached the parameter."""
        return self.reached_and_own_sum(parameter)[0]

    def reached_and_own_sum(self, parameter: Tensor) -> tuple[bool, Tensor | None]:
        """(whether it was reached, its S where that is in a buffer of its own)."""
        moment = self._moments.get(parameter)
        return (False, None) if moment is None else (moment.weight > 0, moment.total)

    def sum_and_m2(
        self, parameter: Tensor, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(S, M2) over the whole step; zeros, like its gradient, where nothing reached it."""
        moment = self._moments.get(parameter)
        if moment is None or not moment.weight:
            m2 = self._moment(parameter, gradient).m2.zero_()
            return torch.zeros_like(m2), m2
        total = self._sum(parameter, moment)
        self._catch_up(moment, total, self.weight)
        return total, moment.m2

    def _start(self, parameter: Tensor, moment: _Moment, gradient: Tensor) -> None:
        """The first gradient of a step; it was 0 in the micro-batches before."""
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
        """A further gradient of a step."""
        stored = self._sum(parameter, moment)
        total = _laid_out(stored, moment.m2)
        self._catch_up(moment, total, self._weight_before)
        weight, adds = self.weight - self._weight_before, moment.total is not None
        if self.sum_guard is not None and not adds and total is stored and total.is_cpu:
            # in one pass with M2; GPUs have several anyway
            adds = self.sum_guard.defer_accumulation(parameter)
        _add(gradient, weight, total, moment.m2, self._weight_before, fused=self._fused, adds=adds)

    def _moment(self, parameter: Tensor, gradient: Tensor | None) -> _Moment:
        moment = self._moments.get(parameter)
        if moment is None or (gradient is not None and gradient.shape != moment.m2.shape):
            like = parameter if gradient is None else gradient
            m2 = torch.empty_like(like, dtype=sum_dtype(like.dtype), requires_grad=False)
            moment = self._moments[parameter] = _Moment(m2)
        return moment

    def _sum(self, parameter: Tensor, moment: _Moment) -> Tensor:
        """S, where it is."""
        if moment.total is not None:
            return moment.total
        assert self.sum_guard is not None
        return self.sum_guard.grad_sum(parameter)

    def _catch_up(self, moment: _Moment, total: Tensor, weight: float) -> None:
        """Counts the micro-batches that missed the parameter since its last gradient."""
        if moment.weight < weight:
            share = (weight - moment.weight) / (moment.weight * weight)
            moment.m2.addcmul_(total, total, value=share)
            moment.weight = weight


def combine_moments(
    totals: Iterable[Tensor],
    seconds: Iterable[Tensor],
    weights: Sequence[float],
    total: Tensor,
    m2: Tensor,
    *,
    fused: bool,
) -> None:
    """Writes S and M2 of several groups of micro-batches taken together, exactly.

        S = sum S_r;   M2 = sum M2_r + sum W_r (S_r / W_r - S / W)^2

    Args:
        totals: S_r.
        seconds: M2_r; none where they are zero.
        weights: W_r; a group of weight 0 is in S alone.
        total: where S goes, float32 at least.
        m2: where M2 goes.
        fused: whether compiled kernels may be used.
    Source:
        Chan, Golub and LeVeque 1979.
    """
    total.zero_()
    m2.zero_()
    before = 0.0
    for row, weight in zip(totals, weights, strict=True):
        if weight and before:
            _add(row.to(total.dtype), weight, total, m2, before, fused=fused, adds=True)
        else:
            total.add_(row)
        before += weight
    for second in seconds:
        m2.add_(second)


def _add(
    gradient: Tensor,
    weight: float,
    total: Tensor,
    m2: Tensor,
    before: float,
    *,
    fused: bool,
    adds: bool,
) -> None:
    """Takes a gradient of this weight in; it adds to the sum too where that is wanted."""
    mean_of, share = weight / before, before / (weight * (before + weight))
    welford = native.welford if fused and native.fits(gradient, total, m2) else _welford
    welford(gradient, total, m2, mean_of, share, adds=adds)


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with the strides of `like`, so that their elements meet in memory."""
    if gradient.stride() == like.stride() or (gradient.is_contiguous() and like.is_contiguous()):
        return gradient
    return torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)


def _welford(
    gradient: Tensor, total: Tensor, m2: Tensor, mean_of: float, weight: float, *, adds: bool
) -> None:
    """What the kernel does, in chunks that stay in a CPU's cache."""
    whole = total.device.type != "cpu" or not total.is_contiguous()
    arrays = (gradient, total, m2)
    chunks = [[x] if whole else torch.split(x.view(-1), _CHUNK) for x in arrays]
    for g, s, m in zip(*chunks, strict=True):
        deviation = torch.sub(g, s, alpha=mean_of)
        m.addcmul_(deviation, deviation, value=weight)
        if adds:
            s.add_(g)
