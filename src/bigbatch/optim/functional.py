"""The mathematics of every rule: pure functions of tensors of any shape, a few lines each.

They run where there are no compiled kernels, `torch.compile` compiles them, and the kernels are
tested against them. They avoid masks: on a CPU a comparison costs eager torch several
multiplications. A layer has S = sum n_d g_d, the sum of its weighted micro-batch gradients,
M2 = sum n_d (g_d - S / N)^2, and N = sum n_d over k micro-batches.
"""

import math

import torch
from torch import Tensor

_ROUNDINGS = 4  # of the mean; a standard deviation below that counts as none


def agreement(dtype: torch.dtype) -> float:
    """The ratio from which on micro-batches agree to rounding."""
    return (_ROUNDINGS * torch.finfo(dtype).eps) ** -2


def ratio(total: Tensor, m2: Tensor, weight: float) -> Tensor:
    """Gradient signal-to-noise ratio of each element, before any normalization.

        q = G^2 / s2 = S^2 / (N M2) = t^2 / (k - 1)

    inf if all micro-batches agree to rounding; nan if all are 0 (or one is nan).

    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), equations 2 and 7; t is Student's statistic.
    """
    negative = (total / m2).mul_(total).div_(-weight)  # in this order, only M2 can overflow
    return torch.threshold_(negative, -agreement(negative.dtype), -torch.inf).neg_()


def out_of_range(total: Tensor, m2: Tensor, weight: float) -> Tensor:
    """Whether the ratio of each element is wrong, since M2 is out of its type's range.

    M2 is inf, or below the normal numbers, and S is neither 0 nor so large that all M2 agree.
    """
    tiny = torch.finfo(m2.dtype).tiny
    agrees = math.sqrt(tiny * agreement(m2.dtype) * weight)
    size = total.abs()
    below = (m2 < tiny) & (size > 0) & (size < agrees)
    return below | (m2.isinf() & size.isfinite())


def live(q: Tensor) -> tuple[Tensor, Tensor]:
    """(q, 1) where a ratio is finite, and (0, 0) elsewhere: the mean of a layer is over these."""
    zero = q * 0  # nan if q is not finite
    return (q + zero).nan_to_num_(0.0), zero.add_(1).nan_to_num_(0.0)


def normalized(q: Tensor, mean: Tensor, gamma: float, r_max: float) -> Tensor:
    """r = min(max(q / mean of q in the layer, gamma), r_max); dead elements get gamma.

    Source:
        VRGD, equations 8 and 9; for undefined values see docs/theory.md (6).
    """
    return (q / mean).nan_to_num(nan=0.0, posinf=torch.inf).clamp(gamma, r_max)


def gsnr(total: Tensor, m2: Tensor, weight: float = 1.0, *, gamma: float, r_max: float) -> Tensor:
    """The factor r of one layer: its gradient signal-to-noise ratio, normalized and clipped.

        r_j <- G_j^2 / s2_j;   r <- r / (mean of r over the layer);   r <- min(max(r, gamma), r_max)

    There is no epsilon, so a factor on the gradients cancels. The layer's mean leaves out elements
    whose variance is 0 or within the rounding of G_j; their r is gamma if G_j = 0 (a dead element),
    else r_max (all micro-batches agree).

    Args:
        total: S, any shape and unit; with weight 1, the mean gradient G.
        m2: M2, in that unit squared; same shape and dtype. With weight 1, the second moment s2.
        weight: N.
        gamma: lower clip, in (0, 1].
        r_max: upper clip, at least 1.
    Returns:
        r, same shape and dtype.
    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), equations 2 and 7 to 9; for undefined values
        see docs/theory.md (6).
    Example:
        >>> gsnr(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]), gamma=0.1, r_max=10.0)
        tensor([1.6000, 0.4000])
    """
    q = ratio(total, m2, weight)
    values, ones = live(q)
    return normalized(q, values.sum() / ones.sum().clamp_min(1), gamma, r_max)


def update_average(average: Tensor, r: Tensor, beta3: float, correction: Tensor | float) -> Tensor:
    """p <- beta3 p + (1 - beta3) r, in place; returns p_hat = p / (1 - beta3^t) = p correction."""
    return average.lerp_(r, 1 - beta3) * correction


def lars_rate(weight_norm: Tensor, gradient_norm: Tensor, decay: float, trust: float) -> Tensor:
    """Trust ratio eta |theta| / (|g| + decay |theta|) of one layer; 1 if a norm is 0.

    Source:
        You, Gitman and Ginsburg 2017 (arXiv 1708.03888), algorithm 1.
    """
    rate = trust * weight_norm / (gradient_norm + decay * weight_norm)
    return torch.where((weight_norm > 0) & (gradient_norm > 0), rate, 1.0)


def lars_step(
    theta: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    lr: Tensor | float,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Momentum step; lr, the learning rate times the trust ratio, is inside the buffer.

    b <- momentum b + lr (g + decay theta);   theta <- theta - b
    """
    update = (gradient + decay * theta) * lr
    buffer.mul_(momentum).add_(update)
    theta.sub_(update.add_(buffer, alpha=momentum) if nesterov else buffer)


def lamb_moments(gradient: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float) -> None:
    """m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2, in their own type."""
    gradient = gradient.to(m.dtype)
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def lamb_direction(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    corrections: tuple[Tensor | float, Tensor | float],
    eps: float,
    decay: float,
) -> Tensor:
    """u = m_hat / (sqrt(v_hat) + eps) + decay theta, corrected by 1 - beta1^t and 1 - beta2^t.

    Source:
        You et al. 2020 (arXiv 1904.00962), algorithm 2.
    """
    m_hat, v_hat = m / corrections[0], v / corrections[1]
    return m_hat.div_(v_hat.sqrt_().add_(eps)).add_(theta, alpha=decay)


def lamb_rate(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    """Trust ratio |theta| / |u| of one layer; 1 if a norm is 0."""
    rate = weight_norm / update_norm
    return torch.where((weight_norm > 0) & (update_norm > 0), rate, 1.0)
