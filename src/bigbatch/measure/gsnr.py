"""Per-element second moment of the micro-batch gradients, and the GSNR that comes of it."""

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.measure.devices import FULL

_PIECE = 1 << 16  # elements, of 256 KB in float32
_AGREE = 4  # weights whose standard deviation is below so many roundings agree exactly


def gsnr(mean: Tensor, second_moment: Tensor, *, gamma: float, r_max: float) -> Tensor:
    """The factor r of one layer: its gradient signal-to-noise ratio, normalized and clipped.

        r_j <- G_j^2 / s2_j;   r <- r / (mean of r over the layer);   r <- min(max(r, gamma), r_max)

    No epsilon enters: a factor on the gradients cancels. Weights whose variance is 0, or no more
    than the rounding of G_j, are left out of the layer's mean; r is then gamma where G_j = 0 too
    (a dead weight) and r_max where it is not (all micro-batches agree).

    Args:
        mean: G, the layer's mean gradient, any shape and unit.
        second_moment: s2, the centred second moment over the micro-batches, in that unit squared;
            same shape and dtype.
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
    limits = torch.finfo(mean.dtype)
    deviation = second_moment.sqrt()
    live = deviation > _AGREE * limits.eps * mean.abs()
    ratio = torch.where(live, (mean / deviation).square(), 0)
    average = ratio.sum() / live.sum()
    ratio /= average.clamp_min(limits.tiny)
    without_variance = torch.full_like(ratio, r_max).masked_fill_(mean == 0, gamma)
    return torch.where(live, ratio, without_variance).clamp_(gamma, r_max)


class GradientMoments:
    """Subscriber of a source: mean and centred second moment of the micro-batch gradients.

    Per element, with W the weight before micro-batch d (Welford, weighted):

        deviation = g_d - mean;   mean += n_d / (W + n_d) deviation
        M2 += n_d W / (W + n_d) deviation^2

    A micro-batch that does not reach a parameter has a gradient of 0 there, and counts as such.
    Both buffers are float32 at least, and what is done to `.grad` later does not reach them.

    Source:
        Welford 1962, West 1979; why not E[g^2] - E[g]^2: docs/theory.md (5).
    """

    def __init__(self) -> None:
        self._before = 0.0  # weight of the complete micro-batches
        self._total = 0.0  # the present one included
        self._seen: dict[Tensor, float] = {}  # parameter -> weight that its moments cover
        self._moments: dict[Tensor, tuple[Tensor, Tensor]] = {}  # -> (mean, M2), kept for reuse

    def begin(self) -> None:
        """A step starts."""
        self._before = self._total = 0.0
        self._seen.clear()

    def micro_batch(self, weight: float) -> None:
        """A micro-batch of n_d = weight starts."""
        self._before = self._total
        self._total += weight

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Takes in n_d g_d, what the micro-batch is about to add to `parameter.grad`."""
        if self._seen.get(parameter) == self._total:
            raise GradientError(
                "a parameter received two gradients in one micro-batch (two backwards, or "
                "reentrant checkpointing); sum the losses and call backward once"
            )
        mean, m2 = self._until(parameter, self._before, gradient)
        weight = self._total - self._before
        _welford(mean, m2, gradient, weight, self._before)
        self._seen[parameter] = self._total

    def end(self) -> None:
        """The micro-batch is complete."""

    def reached(self, parameter: Tensor) -> bool:
        """Whether any micro-batch of the step reached the parameter."""
        return parameter in self._seen

    def all_agree(self) -> bool:
        """Whether no element of any gradient varied over the step; waits for the device."""
        return not any(bool(self.of(parameter)[1].any()) for parameter in self._seen)

    def of(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, second moment) over the whole step, as `gsnr` takes them."""
        mean, m2 = self._until(parameter, self._total, parameter)
        return mean, m2 / self._total

    def _until(self, parameter: Tensor, weight: float, like: Tensor) -> tuple[Tensor, Tensor]:
        """The moments over so much weight: micro-batches that were missed count as 0."""
        if parameter not in self._moments:
            wide = like.dtype if like.dtype in FULL else torch.float32
            mean = torch.zeros(like.shape, dtype=wide, device=like.device)
            self._moments[parameter] = mean, torch.zeros_like(mean)
        mean, m2 = self._moments[parameter]
        seen = self._seen.get(parameter, 0.0)
        if not seen:
            mean.zero_()
            m2.zero_()
        elif seen < weight:
            m2.addcmul_(mean, mean, value=seen * (weight - seen) / weight)
            mean.mul_(seen / weight)
            self._seen[parameter] = weight
        return mean, m2


def _welford(mean: Tensor, m2: Tensor, gradient: Tensor, weight: float, before: float) -> None:
    """Takes n_d g_d into the moments, in pieces that stay in a CPU's cache.

    So memory sees one read of the gradient and a read and a write of either moment: 20 bytes a
    weight in float32, 16 where the gradient is still in cache.
    """
    piece = _PIECE if mean.device.type == "cpu" else max(1, mean.numel())
    scratch = mean.new_empty(min(piece, mean.numel()))
    total = before + weight
    flat = gradient.reshape(-1)
    pieces = (torch.split(x, piece) for x in (flat, mean.view(-1), m2.view(-1)))
    for g, m, s in zip(*pieces, strict=True):
        deviation = torch.sub(g, m, alpha=weight, out=scratch[: g.numel()])  # weight times it
        m.add_(deviation, alpha=1 / total)
        s.addcmul_(deviation, deviation, value=before / (weight * total))
