"""The noise scale in the l1 norm, for optimizers that step by the sign of a gradient."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import to_device, widest_float
from bigbatch.statistics.second_moment import GradientMoments

_EQUAL = 1e-6  # relative difference of sizes that counts as none


class L1Moments(GradientMoments):
    """Subscriber of a source: the sums over elements that the l1 noise scale needs.

    Keeps the sum and the second moment of every element, two buffers of the gradient's size in
    float32 at least. If there are several ranks, both are all-reduced.

    Args:
        source: the source of the gradients.
    """

    def __init__(self, source: GradientSource) -> None:
        super().__init__()
        self._source = source
        self._weights: list[float] = []  # of the micro-batches, as the source states them

    def begin(self) -> None:
        """A step starts."""
        super().begin()
        self._weights.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch starts."""
        super().micro_batch(weight, groups)
        self._weights.append(weight)

    def sums(self, sizes: Sequence[float]) -> Tensor:
        """This rank's share of the values of `L1Sums`, in their order; communicates.

        Args:
            sizes: n_d of this rank's micro-batches; empty if it has none.
        """
        source = self._source
        units = [w / n for w, n in zip(self._weights, sizes, strict=False)]
        unit = units[0] if units else 0.0
        differ = any(not math.isclose(u, unit, rel_tol=_EQUAL) for u in units)
        device = source.parameters[0].device
        numbers = [self.weight, differ, bool(units), unit, unit**2]
        known = torch.tensor(numbers, dtype=widest_float(device), device="cpu")
        weight, known = to_device(known, device).tensor_split((1,))
        source.reducer.all_reduce(weight)
        pairs = self._combined(weight)
        elements = [torch.stack([_l1_norm(m2.sqrt_()), _l1_norm(total)]) for total, m2 in pairs]
        summed = torch.stack([pair.to(weight) for pair in elements]).sum(0)
        return torch.cat([torch.cat([summed, weight]) / source.ranks, known])

    def _combined(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(S, M2) of each trained parameter, over all ranks; both may be written to.

        M2 = sum over ranks of M2_r + W_r (S_r / W_r - S / W)^2
        """
        reducer = self._source.reducer
        for parameter in (p for p in self._source.parameters if p.requires_grad):
            if self.is_reached(parameter):
                own, m2 = (moment.clone() for moment in self.sum_and_m2(parameter))
            else:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                shape = reducer.shape(parameter)
                own = torch.zeros(shape, dtype=dtype, device=parameter.device)
                m2 = torch.zeros_like(own)
            if self._source.ranks == 1:
                yield own, m2
                continue
            total = own.clone()
            reducer.all_reduce(total)
            if self.weight:
                deviation = own.div_(self.weight).sub_(total / weight.to(total.dtype))
                m2.addcmul_(deviation, deviation, value=self.weight)
            reducer.all_reduce(m2)
            yield total, m2


@dataclass(frozen=True)
class L1Sums:
    """Sums over elements, ranks and micro-batches of one step.

    Args:
        deviation: sum_j sqrt(M2_j).
        total: sum_j |S_j|.
        weight: W, the sum of the weights that the source stated.
        unequal: number of ranks whose weights are not in proportion to their sizes.
        active: number of ranks with micro-batches.
        unit, unit_square: sums over these of weight / size and its square.
    """

    deviation: float
    total: float
    weight: float
    unequal: float
    active: float
    unit: float
    unit_square: float

    def noise_scale(self, micro_batches: int, samples: float) -> float:
        """The l1 noise scale of the step; the arguments are k and N over all ranks.

        Raises:
            GradientError: the sizes differ, and the source did not know them.
        """
        spread = self.active * self.unit_square - self.unit**2
        if self.unequal or spread > _EQUAL * self.unit**2:
            raise GradientError(
                "l1_noise_scale=True met micro-batches of different sizes, which it has to know "
                "before their backwards; make them equal, or let AdaptiveBatch cut the batch"
            )
        unit = samples / self.weight if self.weight else math.nan
        return l1_noise_scale(
            self.deviation * math.sqrt(unit), self.total * unit, micro_batches, samples
        )


def l1_noise_scale(deviation: float, total: float, micro_batches: int, samples: float) -> float:
    """B_l1, the noise scale in the norm in which the sign of a gradient is the steepest descent.

        B_l1 = (sum_j sigma_j)^2 / (sum_j |G_j|)^2,   sigma_j^2 = M2_j / (k - 1)

    over all elements j, where sigma_j is the standard deviation of one sample's gradient. With
    few samples it is too small, because noise adds to |G_j|: pure noise of normal gradients gives
    pi N / 2, and no unbiased estimate of |mu_j| exists. The square root of sigma_j^2 is too small
    as well; c4(k), its expectation for normal gradients, is divided out.

    Args:
        deviation: sum_j sqrt(M2_j), with M2_j = sum n_d (g_dj - G_j)^2.
        total: sum_j |S_j|, with S_j = N G_j.
        micro_batches: k, at least 2.
        samples: N.
    Returns:
        B_l1 in samples; +inf if every G_j is 0, nan if every gradient is.
    Raises:
        GradientError: fewer than two micro-batches.
    Source:
        Naganuma et al. 2026 (arXiv 2602.03001), whose code has no c4; docs/theory.md (14).
    Example:
        >>> import torch  # two micro-batches of 4 samples, two elements
        >>> g = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
        >>> m2 = 4 * (g - g.mean(0)).square().sum(0)
        >>> sums = float(m2.sqrt().sum()), float(8 * g.mean(0).abs().sum())
        >>> round(l1_noise_scale(*sums, micro_batches=2, samples=8), 4)  # 8 / 16 x pi / 2
        0.7854
    """
    if micro_batches < 2:
        raise GradientError(
            f"{micro_batches} micro-batch seen, noise needs at least 2; split the batch into more "
            "backwards"
        )
    sigma = deviation / math.sqrt(micro_batches - 1) / root_bias(micro_batches)
    mean = total / samples
    if mean:
        return (sigma / mean) ** 2
    return math.inf if sigma > 0 else math.nan


def root_bias(count: int) -> float:
    """c4: the expected standard deviation of `count` standard normal numbers, below 1.

        c4 = sqrt(2 / (count - 1)) Gamma(count / 2) / Gamma((count - 1) / 2)

    Example:
        >>> round(root_bias(2), 4), round(root_bias(8), 4)
        (0.7979, 0.965)
    """
    gammas = math.lgamma(count / 2) - math.lgamma((count - 1) / 2)
    return math.sqrt(2 / (count - 1)) * math.exp(gammas)


def _l1_norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, ord=1, dtype=widest_float(tensor.device))
    return norm
