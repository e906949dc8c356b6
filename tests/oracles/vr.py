"""The VR optimizers, slow and obvious, in float64 (spec/vrgd.md sections 1 to 3 and 7).

A step takes, for every parameter, the list of its mean gradients, one a micro-batch; None is a
micro-batch that did not reach the parameter. A parameter that none reached is left alone. The
variance is taken in two passes over the list, with weights n_d / N.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, float64, ones_like, stack, zeros_like

Gradients = Sequence[Tensor | None]  # one parameter's, one entry a micro-batch


def mean(gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """g = sum n_d g_d / N."""
    total = zeros_like(gradients[0])
    for g_d, n_d in zip(gradients, weights, strict=True):
        total = total + n_d / sum(weights) * g_d
    return total


def gsnr(
    gradients: Sequence[Tensor], weights: Sequence[float], gamma: float, r_max: float
) -> Tensor:
    """Equations 7 to 9 for one layer; dead elements get gamma, exact ones r_max, neither counts."""
    g = mean(gradients, weights)
    s2 = mean([(g_d - g) ** 2 for g_d in gradients], weights)
    equal = stack([g_d == gradients[0] for g_d in gradients]).all(dim=0)
    dead = equal & (gradients[0] == 0)
    r = ones_like(g)
    if not equal.all():
        raw = g[~equal] ** 2 / s2[~equal]
        r[~equal] = (raw / raw.mean()).clamp(gamma, r_max)
    r[equal] = r_max
    r[dead] = gamma
    return r


class GsnrScaling:
    """r, or its bias-corrected average p_hat where beta3 is given."""

    def __init__(self, gamma: float, r_max: float, beta3: float | None):
        self.gamma, self.r_max, self.beta3 = gamma, r_max, beta3
        self.p: dict[int, Tensor] = {}
        self.t: dict[int, int] = {}

    def __call__(self, i: int, gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """What the mean gradient of parameter i is multiplied by."""
        r = self.r(gradients, weights)
        if self.beta3 is None:
            return r
        self.t[i] = self.t.get(i, 0) + 1
        self.p[i] = self.beta3 * self.p.get(i, zeros_like(r)) + (1 - self.beta3) * r
        return self.p[i] / (1 - self.beta3 ** self.t[i])

    def r(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """The factor before its average."""
        return gsnr(gradients, weights, self.gamma, self.r_max)


class _Oracle:
    """Float64 copies of the parameters, GSNR scaling, and a base rule."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ):
        self.params = [p.detach().to(float64, copy=True) for p in params]
        self.lr, self.weight_decay = lr, weight_decay
        self.sign = -1 if maximize else 1
        self.gsnr_scaling = GsnrScaling(gamma, r_max, beta3)

    def step(
        self,
        gradients: Sequence[Gradients],
        weights: Sequence[float] | None = None,
        clip: Callable[[Tensor], Tensor] = lambda g: g,
    ) -> None:
        """One update; `clip` is what was done to the mean gradient after r was taken."""
        for i, micro in enumerate(gradients):
            if all(g_d is None for g_d in micro):
                continue
            like = self.params[i]
            g_ds = [zeros_like(like) if g_d is None else g_d.to(float64) for g_d in micro]
            n_ds = [1.0] * len(g_ds) if weights is None else list(weights)
            gh = self.sign * self.gsnr_scaling(i, g_ds, n_ds) * clip(mean(g_ds, n_ds))
            self.params[i] = self.update(i, like, gh)

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        """The base rule: parameter i after one step along gh."""
        raise NotImplementedError


class VRSGD(_Oracle):
    """VR-SGD, and VR-Momentum with `momentum`; the buffer begins as gh, undamped, as torch's."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        **common: Any,
    ):
        super().__init__(params, lr, **common)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.buf: dict[int, Tensor] = {}

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        gh = gh + self.weight_decay * theta
        if self.momentum == 0:
            return theta - self.lr * gh
        if i not in self.buf:
            self.buf[i] = gh
        else:
            self.buf[i] = self.momentum * self.buf[i] + (1 - self.dampening) * gh
        if self.nesterov:
            return theta - self.lr * (gh + self.momentum * self.buf[i])
        return theta - self.lr * self.buf[i]


class _Moments(_Oracle):
    """Adam's two moments, bias-corrected: what VR-Adam and VR-LAMB have in common."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        beta3: float | None = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float,
        **common: Any,
    ):
        super().__init__(params, lr, beta3=beta3, **common)
        self.betas, self.eps = betas, eps
        self.m: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.steps: dict[int, int] = {}

    def moments(self, i: int, gh: Tensor) -> tuple[Tensor, Tensor]:
        """m_hat and v_hat of parameter i after they have seen gh."""
        b1, b2 = self.betas
        t = self.steps[i] = self.steps.get(i, 0) + 1
        self.m[i] = b1 * self.m.get(i, zeros_like(gh)) + (1 - b1) * gh
        self.v[i] = b2 * self.v.get(i, zeros_like(gh)) + (1 - b2) * gh**2
        return self.m[i] / (1 - b1**t), self.v[i] / (1 - b2**t)


class VRAdam(_Moments):
    """VR-Adam; the decay is AdamW's, or Adam's L2 penalty where it is not decoupled."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        eps: float = 1e-8,
        decoupled_weight_decay: bool = True,
        **common: Any,
    ):
        super().__init__(params, lr, eps=eps, **common)
        self.decoupled = decoupled_weight_decay

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        if self.decoupled:
            theta = theta - self.lr * self.weight_decay * theta
        else:
            gh = gh + self.weight_decay * theta
        m_hat, v_hat = self.moments(i, gh)
        return theta - self.lr * m_hat / (v_hat.sqrt() + self.eps)


class VRLARS(_Oracle):
    """VR-LARS (You 2017, algorithm 1, on gh): the rate, lr inside, stands in the buffer."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        exclude_bias_and_norm: bool = True,
        **common: Any,
    ):
        super().__init__(params, lr, **common)
        self.momentum, self.nesterov = momentum, nesterov
        self.trust, self.exclude = trust_coefficient, exclude_bias_and_norm
        self.buf: dict[int, Tensor] = {}

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        rate, decay = 1.0, 0.0
        if theta.ndim > 1 or not self.exclude:
            decay = self.weight_decay
            weight, gradient = norm(theta), norm(gh)
            if weight > 0 and gradient > 0:
                rate = self.trust * weight / (gradient + decay * weight)
        step = self.lr * rate * (gh + decay * theta)
        self.buf[i] = self.momentum * self.buf.get(i, zeros_like(theta)) + step
        return theta - (self.momentum * self.buf[i] + step if self.nesterov else self.buf[i])


class VRLAMB(_Moments):
    """VR-LAMB (You 2020, algorithm 2, on gh): Adam's direction and the decay, as long as theta."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_bias_and_norm: bool = True,
        **common: Any,
    ):
        super().__init__(params, lr, eps=eps, weight_decay=weight_decay, **common)
        self.exclude = exclude_bias_and_norm

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        m_hat, v_hat = self.moments(i, gh)
        u = m_hat / (v_hat.sqrt() + self.eps)
        rate = 1.0
        if theta.ndim > 1 or not self.exclude:
            u = u + self.weight_decay * theta
            if norm(theta) > 0 and norm(u) > 0:
                rate = norm(theta) / norm(u)
        return theta - self.lr * rate * u


# the bases: r is 1 everywhere, so a list of one mean gradient will do
LARS = functools.partial(VRLARS, gamma=1.0)
LAMB = functools.partial(VRLAMB, gamma=1.0, beta3=None)


def norm(x: Tensor) -> float:
    """Euclidean, over all elements."""
    return math.sqrt(math.fsum((x**2).flatten().tolist()))
