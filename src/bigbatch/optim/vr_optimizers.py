"""The named optimizers of the VRGD paper: scaling by GSNR, and a base step of torch or of ours."""

from typing import Any, Unpack

from torch.optim import SGD, Adam

from bigbatch.optim.fused_step import can_fuse
from bigbatch.optim.gsnr_options import Betas, Rate, VROptions
from bigbatch.optim.lamb import LAMB
from bigbatch.optim.lars import LARS
from bigbatch.optim.trust_ratio import Parameters
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.setting_types import NotNegative, Number, Positive, Share, checked


class _Fusing(VarianceReduced):
    """Takes torch's fused step, where that is right, for every group that did not choose."""

    _chooses_fused = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `VarianceReduced` does; what is fused depends on this machine, not on the file."""
        chosen = [group["fused"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, fused in zip(self.param_groups, chosen, strict=True):
            group["fused"] = fused

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        # with vr=False gradients may be sparse, which no fused step takes
        if group["fused"] is None and group["foreach"] is None and group["vr"]:
            group["fused"] = all(can_fuse(self.base, p) for p in group["params"])


class VRSGD(_Fusing):
    """VR-SGD, and VR-Momentum where `momentum` is not 0: torch's SGD on r g.

        b <- momentum b + (1 - dampening) (r g + weight_decay theta);   theta <- theta - lr b

    Args:
        params: parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach: torch's own.
        fused: whether scaling and torch's step are; None: where they can be.
        options: gamma, r_max, beta3, factor, watch, compiled: see `VarianceReduced`.
    Source:
        VRGD, algorithm 1 (VR-SGD); VR-Momentum by its section 4.2.
    """

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: Rate = 1e-3,
        momentum: Share = 0.0,
        dampening: Number = 0.0,
        weight_decay: NotNegative = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        **options: Unpack[VROptions],
    ) -> None:
        base = SGD(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        super().__init__(base, fused=fused, **options)


class VRAdam(_Fusing):
    """VR-Adam: torch's Adam on p_hat g, p being the momentum of r.

        g <- p_hat g;   m, v and theta as in AdamW, or in Adam where the decay is not decoupled

    Reconstructed: the paper's own box was not available, and its text fixes these three choices
    only by implication: both moments see the adapted gradient, r is clipped before it is averaged,
    the hat is the bias correction. There is no `amsgrad`: its maximum of v would keep the largest
    p_hat g ever seen, a mixture of gradients and of how well they were known.

    Args:
        params: parameters or groups, as for `torch.optim.Adam`.
        lr, betas, eps, maximize, foreach: torch's own.
        weight_decay: 0 by default.
        decoupled_weight_decay: decay of theta, as AdamW's; False: decay_theta is added to p_hat g.
        fused: whether scaling and torch's step are; None: where they can be.
        options: gamma, r_max, beta3 (0.9), factor, watch, compiled: see `VarianceReduced`.
    Source:
        VRGD, sections 4.2 and 6.
    """

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        **options: Unpack[VROptions],
    ) -> None:
        base = Adam(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        super().__init__(base, fused=fused, **(VROptions(beta3=0.9) | options))


class VRLARS(VarianceReduced):
    """VR-LARS: `LARS` on r g, which enters the trust ratio too, so that a uniform r cancels.

    Args:
        params, lr, momentum, weight_decay, trust_coefficient, nesterov, exclude_bias_and_norm,
            maximize: as for `LARS`.
        fused: whether scaling and the step are; None: where they can be.
        options: gamma, r_max, beta3, factor, watch, compiled: see `VarianceReduced`.
    Source:
        VRGD, section 4.2: GSNR adapts the gradient mean before LARS applies it.
    """

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: Rate = 0.1,
        momentum: Share = 0.9,
        weight_decay: NotNegative = 0.0,
        *,
        trust_coefficient: Positive = 0.001,
        nesterov: bool = False,
        exclude_bias_and_norm: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
        **options: Unpack[VROptions],
    ) -> None:
        base = LARS(
            params,
            lr,
            momentum,
            weight_decay,
            trust_coefficient=trust_coefficient,
            nesterov=nesterov,
            exclude_bias_and_norm=exclude_bias_and_norm,
            maximize=maximize,
            fused=fused,
        )
        super().__init__(base, fused=fused, **options)


class VRLAMB(VarianceReduced):
    """VR-LAMB: `LAMB` on p_hat g, p being the momentum of r.

    Reconstructed as `VRAdam` is: "similar to VR-Adam, except layer-wisely adapt the LRs" is all
    that the paper's text says.

    Args:
        params, lr, betas, eps, weight_decay, exclude_bias_and_norm, maximize: as for `LAMB`.
        fused: whether scaling and the step are; None: where they can be.
        options: gamma, r_max, beta3 (0.9), factor, watch, compiled: see `VarianceReduced`.
    Source:
        VRGD, section 4.2.
    """

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
        **options: Unpack[VROptions],
    ) -> None:
        base = LAMB(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            exclude_bias_and_norm=exclude_bias_and_norm,
            maximize=maximize,
            fused=fused,
        )
        super().__init__(base, fused=fused, **(VROptions(beta3=0.9) | options))
