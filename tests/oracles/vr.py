"""VR-SGD, VR-Momentum and VR-Adam, slow and obvious, in float64 (spec/vrgd.md sections 1 to 3).

A step takes, for every parameter, the list of its mean gradients, one a micro-batch; None is a
micro-batch that did not reach the parameter. A parameter that none reached is left alone. The
variance is taken in two passes over the list, with weights n_d / N.
"""

from collections.abc import Callable, Iterable, Sequence

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


class Fold:
    """r, or its bias-corrected average p_hat where beta3 is given."""

    def __init__(self, gamma: float, r_max: float, beta3: float | None):
        self.gamma, self.r_max, self.beta3 = gamma, r_max, beta3
        self.p: dict[int, Tensor] = {}
        self.t: dict[int, int] = {}

    def __call__(self, i: int, gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """What the mean gradient of parameter i is multiplied by."""
        r = gsnr(gradients, weights, self.gamma, self.r_max)
        if self.beta3 is None:
            return r
        self.t[i] = self.t.get(i, 0) + 1
        self.p[i] = self.beta3 * self.p.get(i, zeros_like(r)) + (1 - self.beta3) * r
        return self.p[i] / (1 - self.beta3 ** self.t[i])


class _Oracle:
    """Float64 copies of the parameters, a fold, and a base rule."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, gamma: float, r_max: float, beta3: float | None
    ):
        self.params = [p.detach().to(float64, copy=True) for p in params]
        self.lr = lr
        self.fold = Fold(gamma, r_max, beta3)

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
            gh = self.fold(i, g_ds, n_ds) * clip(mean(g_ds, n_ds))
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
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr, gamma, r_max, beta3)
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.weight_decay = weight_decay
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


class VRAdam(_Oracle):
    """VR-Adam with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr, gamma, r_max, beta3)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.m: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.steps: dict[int, int] = {}

    def update(self, i: int, theta: Tensor, gh: Tensor) -> Tensor:
        b1, b2 = self.betas
        t = self.steps[i] = self.steps.get(i, 0) + 1
        self.m[i] = b1 * self.m.get(i, zeros_like(theta)) + (1 - b1) * gh
        self.v[i] = b2 * self.v.get(i, zeros_like(theta)) + (1 - b2) * gh**2
        m_hat = self.m[i] / (1 - b1**t)
        v_hat = self.v[i] / (1 - b2**t)
        theta = theta - self.lr * self.weight_decay * theta
        return theta - self.lr * m_hat / (v_hat.sqrt() + self.eps)
