"""LAMB: Adam whose every layer has its own rate."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.gsnr_options import Betas, Rate
from bigbatch.optim.trust_ratio import Parameters, ParameterShard, TrustRatioOptimizer
from bigbatch.optim.two_pass import TwoPass
from bigbatch.setting_types import NotNegative, Positive, checked


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments: Adam's direction, as long as the layer's weights.

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay theta
        theta <- theta - lr |theta| / |u| u                              (1 where a norm is 0)

    Both moments are bias-corrected and |theta| is not clamped, as in the authors' use. Clip the
    global norm yourself: nothing here does.

    Args:
        params: parameters or groups, floating point and dense.
        lr: learning rate; a number or a tensor of one.
        betas: of the two moments, in [0, 1).
        eps: above 0.
        weight_decay: inside the direction that the trust ratio scales.
        exclude_bias_and_norm: no decay and ratio 1 for parameters of at most one dimension.
        maximize: steps along the gradient.
        fused: whether compiled kernels may do it; None: where they fit, torch elsewhere.
    Raises:
        SettingError: a value outside its range.
    Source:
        You et al. 2020 (arXiv 1904.00962), algorithm 2.
    """

    _names = ("exp_avg", "exp_avg_sq")

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 0.01,
        *,
        exclude_bias_and_norm: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "exclude_bias_and_norm": exclude_bias_and_norm,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _start(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(parameter, dtype=sum_dtype(parameter.dtype))
        return {
            "exp_avg": zeros,
            "exp_avg_sq": zeros.clone(),
            "step": torch.tensor(0.0, dtype=torch.float32),
        }

    def _passes(
        self, parts: list[ParameterShard], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        layers = [(part.theta, part.gradient, part.state[0], part.state[1]) for part in parts]
        (beta1, beta2), eps, lr = group["betas"], group["eps"], float(group["lr"])
        correct = [(1 - beta1**part.steps, 1 - beta2**part.steps) for part in parts]
        decay = group["weight_decay"] if adapts else 0.0
        sign = -1.0 if group["maximize"] else 1.0

        def moments(i: int) -> Tensor:
            theta, gradient, m, v = layers[i]
            functional.lamb_moments(sign * gradient, m, v, beta1, beta2)
            u = functional.lamb_direction(theta, m, v, correct[i], eps, decay)
            return torch.stack([functional.squares(theta), functional.squares(u)])

        def step(i: int, sums: Tensor) -> None:
            theta, _, m, v = layers[i]
            weight, norm = sums.sqrt()
            rate = functional.lamb_rate(weight, norm) if adapts else 1.0
            u = functional.lamb_direction(theta, m, v, correct[i], eps, decay)
            theta.sub_(u * (lr * rate))

        return TwoPass(
            native.Rule.LAMB,
            layers,
            own=correct,
            group=[lr, decay, sign, adapts, beta1, beta2, eps],
            first=moments,
            second=step,
        )
