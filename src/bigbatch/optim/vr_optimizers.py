"""The VRGD paper's optimizers: GSNR scaling, and a base step of torch or of this package."""

from typing import Annotated, Unpack

from torch.optim import SGD, Adam
from torch.optim.optimizer import ParamsT

from bigbatch.optim.optimizer_settings import Betas, Rate, VROptions
from bigbatch.optim.trust_ratio import LAMB, LARS
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.setting_types import Coefficient, In, PositiveCoefficient, Share, checked


class VRSGD(VarianceReduced):
    """VR-SGD, and VR-Momentum if `momentum` is not 0: torch's SGD on r g.

        b <- momentum b + (1 - dampening) (r g + weight_decay theta);   theta <- theta - lr b

    Args:
        params: parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach: torch's own.
        fused: whether scaling and torch's step use fused kernels; None: wherever they can.
        options: gamma, r_max, beta3, watch: see `VarianceReduced`.
    Source:
        VRGD, algorithm 1 (VR-SGD); VR-Momentum by its section 4.2.
    """

    _chooses_fused = True

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        momentum: Share = 0.0,
        dampening: Annotated[float, In("[-3.4e38, 3.4e38]")] = 0.0,
        weight_decay: Coefficient = 0.0,
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


class VRAdam(VarianceReduced):
    """VR-Adam: torch's Adam on p_hat g, p being the momentum of r.

        g <- p_hat g;   m, v and theta as in AdamW, or as in Adam if the decay is not decoupled

    Reconstructed: the paper's own box was not available, and its text only implies three choices:
    both moments use the scaled gradient, r is clipped before it is averaged, and the hat is the
    bias correction. There is no `amsgrad`: its maximum of v would keep the largest p_hat g so far,
    in which gradients and their GSNR are mixed.

    Args:
        params: parameters or groups, as for `torch.optim.Adam`.
        lr, betas, eps, maximize, foreach: torch's own.
        weight_decay: 0 by default.
        decoupled_weight_decay: True decays theta as in AdamW; False adds weight_decay theta to
            p_hat g.
        fused: whether scaling and torch's step use fused kernels; None: wherever they can.
        options: gamma, r_max, beta3 (0.9), watch: see `VarianceReduced`.
    Source:
        VRGD, sections 4.2 and 6.
    """

    _chooses_fused = True

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: Coefficient = 1e-8,
        weight_decay: Coefficient = 0.0,
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
    """VR-LARS: `LARS` on r g. The trust ratio uses r g too, so a uniform r cancels.

    Args:
        params to maximize: as for `LARS`.
        fused: whether scaling and the step use compiled kernels; None: wherever they can.
        options: gamma, r_max, beta3, watch: see `VarianceReduced`.
    Source:
        VRGD, section 4.2: GSNR adapts the gradient mean before LARS applies it.
    """

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.1,
        momentum: Share = 0.9,
        weight_decay: Coefficient = 0.0,
        *,
        trust_coefficient: PositiveCoefficient = 0.001,
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

    Reconstructed like `VRAdam`. The paper's text has only "similar to VR-Adam, except layer-wisely
    adapt the LRs".

    Args:
        params, lr, betas, eps, weight_decay, exclude_bias_and_norm, maximize: as for `LAMB`.
        fused: whether scaling and the step use compiled kernels; None: wherever they can.
        options: gamma, r_max, beta3 (0.9), watch: see `VarianceReduced`.
    Source:
        VRGD, section 4.2.
    """

    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: PositiveCoefficient = 1e-6,
        weight_decay: Coefficient = 0.01,
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
