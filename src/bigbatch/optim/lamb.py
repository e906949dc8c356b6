"""LAMB: Adam with a learning rate for each layer."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.gsnr_options import Betas, Rate
from bigbatch.optim.trust_ratio import ParameterShard, TrustRatioOptimizer
from bigbatch.optim.two_pass import TwoPass
from bigbatch.setting_types import NotNegative, Positive, checked


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments: Adam's direction, scaled to the norm of the layer's weights.

        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay theta
        theta <- theta - lr |theta| / |u| u                              (1 if a norm is 0)

    Both moments are bias-corrected and |theta| is not clamped, as in the authors' use. LAMB does
    not clip the global norm; clip it yourself.

    Args:
        params: parameters or groups, floating point and dense.
        lr: learning rate; a number or a tensor of one element.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment, above 0.
        weight_decay: decay inside the direction that the trust ratio scales.
        exclude_bias_and_norm: no decay and ratio 1 for parameters of at most one dimension.
        maximize: steps along the gradient.
        fused: whether compiled kernels may be used; None: where they fit, and torch elsewhere.
    Raises:
        SettingError: a value is outside its range.
    Source:
        You et al. 2020 (arXiv 1904.00962), algorithm 2.
    """

    _state_names = ("exp_avg", "exp_avg_sq")

    @checked
    def __init__(
        self,
        params: ParamsT,
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

    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(parameter, dtype=sum_dtype(parameter.dtype))
        return {
            "exp_avg": zeros,
            "exp_avg_sq": zeros.clone(),
            "step": torch.tensor(0.0, dtype=torch.float32),
        }

    def _passes(
        self, shards: list[ParameterShard], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        layers = [(s.theta, s.gradient, s.state[0], s.state[1]) for s in shards]
        (beta1, beta2), eps, lr = group["betas"], group["eps"], float(group["lr"])
        corrections = [(1 - beta1**s.steps, 1 - beta2**s.steps) for s in shards]
        decay = group["weight_decay"] if adapts else 0.0
        sign = -1.0 if group["maximize"] else 1.0

        def moments(i: int) -> Tensor:
            theta, gradient, m, v = layers[i]
            functional.lamb_moments(sign * gradient, m, v, beta1, beta2)
            u = functional.lamb_direction(theta, m, v, corrections[i], eps, decay)
            return torch.stack([functional.squares(theta), functional.squares(u)])

        def step(i: int, sums: Tensor) -> None:
            theta, _, m, v = layers[i]
            weight, norm = sums.sqrt()
            rate = functional.lamb_rate(weight, norm) if adapts else 1.0
            u = functional.lamb_direction(theta, m, v, corrections[i], eps, decay)
            theta.sub_(u * (lr * rate))

        return TwoPass(
            native.Rule.LAMB,
            layers,
            layer_values=corrections,
            group_values=[lr, decay, sign, adapts, beta1, beta2, eps],
            first_pass=moments,
            second_pass=step,
        )
