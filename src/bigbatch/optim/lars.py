"""LARS: momentum with a learning rate for each layer."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigbatch.errors import SettingError
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.gsnr_options import Rate
from bigbatch.optim.trust_ratio import ParameterShard, TrustRatioOptimizer
from bigbatch.optim.two_pass import TwoPass
from bigbatch.setting_types import NotNegative, Positive, Share, checked


class LARS(TrustRatioOptimizer):
    """Layer-wise adaptive rate scaling: steps proportional to the norm of a layer's weights.

        rate = trust_coefficient |theta| / (|g| + weight_decay |theta|)     (1 if a norm is 0)
        b <- momentum b + lr rate (g + weight_decay theta);   theta <- theta - b

    The learning rate is inside the buffer, as in the paper: when it changes, the steps that are
    already in the buffer keep their own.

    Args:
        params: parameters or groups, floating point and dense.
        lr: learning rate; a number or a tensor of one element.
        momentum: in [0, 1).
        weight_decay: decay that is added to the gradient, inside the trust ratio.
        trust_coefficient: eta, above 0.
        nesterov: whether theta <- theta - (momentum b + the last summand).
        exclude_bias_and_norm: no decay and rate 1 for parameters of at most one dimension.
        maximize: steps along the gradient.
        fused: whether compiled kernels may be used; None: where they fit, and torch elsewhere.
    Raises:
        SettingError: a value is outside its range.
    Source:
        You, Gitman and Ginsburg 2017 (arXiv 1708.03888), algorithm 1.
    """

    _state_names = ("momentum_buffer",)

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.1,
        momentum: Share = 0.9,
        weight_decay: NotNegative = 0.0,
        *,
        trust_coefficient: Positive = 0.001,
        nesterov: bool = False,
        exclude_bias_and_norm: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "exclude_bias_and_norm": exclude_bias_and_norm,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _require_valid(self, group: dict[str, Any]) -> None:
        super()._require_valid(group)
        if group["nesterov"] and not group["momentum"]:
            raise SettingError("nesterov=True needs a momentum")

    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _passes(
        self, shards: list[ParameterShard], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        layers = [(s.theta, s.gradient, s.state[0], None) for s in shards]
        lr, trust = float(group["lr"]), group["trust_coefficient"]
        decay = group["weight_decay"] if adapts else 0.0
        momentum, nesterov = group["momentum"], group["nesterov"]
        sign = -1.0 if group["maximize"] else 1.0

        def step(i: int, sums: Tensor) -> None:
            theta, gradient, buffer, _ = layers[i]
            weight, norm = sums.sqrt()
            rate = functional.lars_rate(weight, norm, decay, trust) if adapts else 1.0
            functional.lars_step(
                theta, sign * gradient, buffer, lr * rate, decay, momentum, nesterov
            )

        return TwoPass(
            native.Rule.LARS,
            layers,
            layer_values=[(0.0, 0.0)] * len(layers),
            group_values=[lr, decay, sign, adapts, momentum, trust, nesterov],
            first_pass=lambda i: torch.stack([functional.squares(x) for x in layers[i][:2]]),
            second_pass=step,
        )
