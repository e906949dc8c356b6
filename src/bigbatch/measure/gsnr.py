"""Per-element second moment of the micro-batch gradients, and the GSNR that comes of it."""

import torch
from torch import Tensor

from bigbatch.errors import GradientError

_EXACT_SUMS = (torch.float32, torch.float64)


def gsnr(mean: Tensor, second_moment: Tensor, *, gamma: float, r_max: float) -> Tensor:
    """The factor r of one layer: its gradient signal-to-noise ratio, normalized and clipped.

        r_j <- G_j^2 / s2_j;   r <- r / (mean of r over the layer);   r <- min(max(r, gamma), r_max)

    No epsilon enters: a constant factor on either argument cancels. Weights whose variance is
    exactly 0 are left out of the layer's mean; r is then gamma where G_j = 0 too (a dead weight)
    and r_max where it is not (all micro-batches agree).

    Args:
        mean: G, the layer's mean gradient, any shape and unit.
        second_moment: s2, its centred second moment over the micro-batches, in that unit squared,
            up to a constant factor; same shape.
        gamma: lower clip, in (0, 1].
        r_max: upper clip, at least 1.
    Returns:
        r, same shape and dtype as `second_moment`.
    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), equations 2 and 7 to 9; where they are not
        defined: docs/theory.md (6).
    Example:
        >>> gsnr(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]), gamma=0.1, r_max=10.0)
        tensor([1.6000, 0.4000])
    """
    live = second_moment > 0
    highest = torch.finfo(second_moment.dtype).max / max(1, second_moment.numel())
    ratio = mean.to(second_moment.dtype).square() / second_moment
    ratio = torch.where(live, ratio, 0).clamp_max(highest)
    average = ratio.sum() / live.sum()
    relative = ratio / average.clamp_min(torch.finfo(average.dtype).tiny)
    without_variance = torch.where(mean == 0, gamma, r_max).to(ratio.dtype)
    return torch.where(live, relative, without_variance).clamp(gamma, r_max)


class GradientMoments:
    """Subscriber of a source: M2 = sum_d n_d (g_d - G)^2 per element, centred, in one buffer.

    While a hook runs, `.grad` is the sum of the micro-batches before, so it serves as the running
    mean (Welford, weighted). With W the weight before micro-batch d:

        M2 += n_d W / (W + n_d) (g_d - mean of those before)^2

    A micro-batch that does not reach a parameter has a gradient of 0 there, and counts as such.
    Squares are float32 at least; for half types the sum is kept here as well.

    Source:
        Welford 1962, West 1979; why not E[g^2] - E[g]^2: docs/theory.md (5).
    """

    def __init__(self) -> None:
        self.micro_batches = 0
        self._before = 0.0  # weight of the complete micro-batches
        self._total = 0.0  # the present one included
        self._seen: dict[Tensor, float] = {}  # parameter -> weight that its M2 covers
        self._m2: dict[Tensor, Tensor] = {}  # parameter -> its buffer, kept from step to step
        self._sums: dict[Tensor, Tensor] = {}  # half-type parameter -> sum of gradients

    def begin(self) -> None:
        """A step starts."""
        self.micro_batches = 0
        self._before = self._total = 0.0
        self._seen.clear()

    def micro_batch(self, weight: float) -> None:
        """A micro-batch of n_d = weight starts."""
        self._before = self._total
        self._total += weight

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Takes in what the micro-batch is about to add to `parameter.grad`."""
        seen = self._seen.get(parameter, 0.0)
        if seen == self._total:
            raise GradientError(
                "a parameter received two gradients in one micro-batch (two backwards, or "
                "reentrant checkpointing); sum the losses and call backward once"
            )
        weight = self._total - self._before
        m2 = self._buffer(parameter)
        deviation = gradient.to(m2.dtype) / weight
        if seen:
            self._count_absence(parameter, self._before)
            deviation -= self._sum(parameter) / self._before
        else:
            m2.zero_()
        m2.addcmul_(deviation, deviation, value=weight * self._before / self._total)
        self._add(parameter, gradient, first=not seen)
        self._seen[parameter] = self._total

    def end(self) -> None:
        """The micro-batch is complete."""
        self.micro_batches += 1

    def of(self, parameter: Tensor) -> tuple[Tensor, Tensor] | None:
        """(sum of the gradients, M2 over the whole step); None where no micro-batch reached it.

        The two share one unit up to a constant, which is all that `gsnr` asks for.
        """
        if not self._seen.get(parameter):
            return None
        self._count_absence(parameter, self._total)
        return self._sum(parameter), self._buffer(parameter)

    def _count_absence(self, parameter: Tensor, until: float) -> None:
        """Merges the micro-batches that did not reach the parameter: gradients of 0."""
        seen = self._seen[parameter]
        if seen < until:
            mean = self._sum(parameter) / seen
            self._buffer(parameter).addcmul_(mean, mean, value=seen * (until - seen) / until)
            self._seen[parameter] = until

    def _buffer(self, parameter: Tensor) -> Tensor:
        if parameter not in self._m2:
            wide = parameter.dtype if parameter.dtype in _EXACT_SUMS else torch.float32
            self._m2[parameter] = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
        return self._m2[parameter]

    def _sum(self, parameter: Tensor) -> Tensor:
        if parameter in self._sums:
            return self._sums[parameter]
        assert parameter.grad is not None
        return parameter.grad

    def _add(self, parameter: Tensor, gradient: Tensor, *, first: bool) -> None:
        if parameter.dtype in _EXACT_SUMS:
            return
        if first:
            self._sums[parameter] = gradient.float().clone()
        else:
            self._sums[parameter].add_(gradient)
