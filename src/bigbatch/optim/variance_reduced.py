"""Variance-reduced gradient descent: fold r into the gradient, then the base optimizer's step."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from bigbatch.errors import GradientError, SettingError
from bigbatch.measure.gsnr import GradientMoments, gsnr
from bigbatch.measure.source import GradientSource, PlainSource

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_AVERAGE = "gsnr_average"
_STEPS = "gsnr_steps"
_FEW = 8  # below it the ratio's variance is infinite or nearly so


class VarianceReduced(Optimizer):
    """Any torch optimizer, its gradient multiplied by the clipped GSNR before each step.

        r = GSNR of each weight over the micro-batches, normalized per tensor, in [gamma, r_max]
        with beta3:  p <- beta3 p + (1 - beta3) r,   p_hat = p / (1 - beta3^t)
        gradient <- r g   (p_hat g with beta3), then the base optimizer's own step

    In a loop of your own, call `backward()` at least twice between `zero_grad()` and `step()`:
    every backward is one micro-batch of the same size and its losses share one factor. In
    `AdaptiveBatch` the sizes are known and may differ. After `step()`, `.grad` holds r g.

    `param_groups`, `state` and `defaults` are the base optimizer's own; gamma, r_max and beta3
    stand in the groups and may differ between them.

    Args:
        base: the optimizer to be scaled, over dense real parameters.
        gamma: lower clip of r, in (0, 1]. 1 turns the scaling off where r_max is 1 too.
        r_max: upper clip of r, at least 1. 1 as printed in the paper (equation 9), which makes
            every step at most the base optimizer's; 1 / gamma lets well-known weights go further.
        beta3: momentum of r, in [0, 1); None for none.
    Raises:
        SettingError: a value outside its range, or a base optimizer that is scaled already.
        GradientError: at `step()`, fewer than two micro-batches since `zero_grad()`.
    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), algorithm 1; VR-Adam and VR-Momentum are
        reconstructed from its text (docs/theory.md (7)).
    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VarianceReduced(SGD([weight], lr=1.0), gamma=0.1)
        >>> for gradient in ([1.0, 1.0], [1.0, 3.0]):
        ...     (weight * torch.tensor(gradient) / 2).sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()  # the first weight's gradient is exact: r = r_max
        [-1.0, -2.0]
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = None,
    ) -> None:
        if isinstance(base, VarianceReduced):
            raise SettingError(f"{type(base).__name__} is scaled already; pass its base optimizer")
        if isinstance(base, LBFGS):
            raise SettingError("LBFGS evaluates its closure many times a step; it has no one r")
        self.base = base
        self._own = {"gamma": gamma, "r_max": r_max, "beta3": beta3}
        self._averages: dict[Tensor, tuple[Tensor, int]] = {}  # parameter -> (p, t)
        self._moments = GradientMoments()
        self._warned = False
        # torch's hooks and step profiling; groups and state are the base optimizer's
        self.__setstate__({"defaults": base.defaults})
        for group in base.param_groups:
            self._adopt(group)
        self._source: GradientSource = PlainSource(self._parameters())
        self._source.subscribe(self._moments)

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "own": self._own, "averages": list(self._averages.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" not in state:
            super().__setstate__(state)
            return
        VarianceReduced.__init__(self, state["base"], **state["own"])
        self._averages = dict(state["averages"])

    # the base optimizer's, under our name

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's groups."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state; what VarianceReduced keeps stands beside it."""
        return self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer and watches its gradients."""
        self.base.add_param_group(param_group)
        try:
            self._adopt(self.base.param_groups[-1])
        except SettingError:
            self.base.param_groups.pop()
            raise
        self._source.add(self._parameters())

    # one step

    def follow(self, source: GradientSource) -> None:
        """Takes its gradients from `source` instead of hooks of its own."""
        self._source.unsubscribe(self._moments)
        self._source = source
        self._source.subscribe(self._moments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the gradients; the micro-batches seen so far are forgotten."""
        self.base.zero_grad(set_to_none)
        self._source.restart()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Folds r into the gradients and lets the base optimizer step.

        Args:
            closure: computes the loss and calls `backward()` at least twice; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_micro_batches()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._fold(parameter, group)
        self.base.step()
        self._source.restart()
        return loss

    def _require_micro_batches(self) -> None:
        k = self._source.micro_batches
        if k < 2:
            raise GradientError(
                f"{type(self).__name__} saw {k} backward() calls since zero_grad(), it needs at "
                f"least 2 (k >= {_FEW} is better): split the batch into micro-batches"
            )
        if self._warned:
            return
        self._warned = True
        if self._moments.all_agree():
            warnings.warn(
                "every micro-batch has the same gradient, so r says nothing; is it the same data, "
                "or a gradient that was averaged already?",
                stacklevel=3,
            )
        if k < _FEW:
            warnings.warn(
                f"k = {k} micro-batches give a poor signal-to-noise ratio: pure noise has a mean "
                f"ratio of 1 / (k - 3); use k >= {_FEW}",
                stacklevel=3,
            )

    def _fold(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Puts r g, or p_hat g, where g was."""
        assert parameter.grad is not None
        if not self._moments.reached(parameter) and parameter.grad.any():
            raise GradientError(
                "a parameter has a gradient that no counted backward gave it; let every gradient "
                "come from backward() after zero_grad()"
            )
        r = gsnr(*self._moments.of(parameter), gamma=group["gamma"], r_max=group["r_max"])
        beta3 = group["beta3"]
        if beta3 is not None:
            average, t = self._averages.get(parameter, (torch.zeros_like(r), 0))
            average.lerp_(r, 1 - beta3)
            self._averages[parameter] = average, t + 1
            r = average / (1 - beta3 ** (t + 1))
        parameter.grad.mul_(r)

    # what is saved

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dict; p and its step count stand with each parameter."""
        packed = self.base.state_dict()
        packed["state"] = {index: dict(state) for index, state in packed["state"].items()}
        for index, parameter in enumerate(self._parameters()):
            if parameter in self._averages:
                average, t = self._averages[parameter]
                mine = {_AVERAGE: average, _STEPS: torch.tensor(float(t))}
                packed["state"].setdefault(index, {}).update(mine)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or the state dict of a bare base optimizer."""
        averages: dict[Tensor, tuple[Tensor, int]] = {}
        parameters = self._parameters()
        rest: dict[Any, dict[str, Any]] = {}
        for index, state in state_dict["state"].items():
            rest[index] = {k: v for k, v in state.items() if k not in (_AVERAGE, _STEPS)}
            if _AVERAGE in state:
                average = state[_AVERAGE].to(parameters[index].device, copy=True)
                averages[parameters[index]] = average, int(state[_STEPS])
        own = [{name: group[name] for name in self._own} for group in self.param_groups]
        self.base.load_state_dict({**state_dict, "state": {i: s for i, s in rest.items() if s}})
        for group, before in zip(self.base.param_groups, own, strict=True):
            for name, value in before.items():
                group.setdefault(name, value)
        self._averages = averages
        self._source.restart()

    # groups

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _adopt(self, group: dict[str, Any]) -> None:
        for name, default in self._own.items():
            group.setdefault(name, default)
        _require_valid(group)


def _require_valid(group: dict[str, Any]) -> None:
    gamma, r_max, beta3 = group["gamma"], group["r_max"], group["beta3"]
    if not 0 < gamma <= 1:
        raise SettingError(f"gamma={gamma} must lie in (0, 1]: it is the least factor of a step")
    if not 1 <= r_max < math.inf:
        raise SettingError(f"r_max={r_max} must be at least 1; 1.0 or 1 / gamma are usual")
    if beta3 is not None and not 0 <= beta3 < 1:
        raise SettingError(f"beta3={beta3} must lie in [0, 1), or be None for no momentum on r")
    for parameter in group["params"]:
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise SettingError(
                f"a {parameter.dtype} parameter of layout {parameter.layout} has no GSNR; give it "
                "to an optimizer of its own"
            )


class VRSGD(VarianceReduced):
    """VR-SGD, and VR-Momentum where `momentum` is not 0: torch's SGD on r g.

        b <- momentum b + (1 - dampening) (r g + weight_decay theta);   theta <- theta - lr b

    Args:
        params: parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused: torch's own.
        gamma, r_max, beta3: see `VarianceReduced`.
    Source:
        VRGD, algorithm 1 (VR-SGD); VR-Momentum by its section 4.2.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
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
        super().__init__(base, gamma=gamma, r_max=r_max, beta3=beta3)


class VRAdam(VarianceReduced):
    """VR-Adam: torch's AdamW on p_hat g, p being the momentum of r.

        g <- p_hat g;   m, v and theta as in AdamW (decoupled weight decay)

    Reconstructed: the paper's own box was not available, and its text fixes these three choices
    only by implication: both moments see the adapted gradient, r is clipped before it is averaged,
    the hat is the bias correction.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`.
        lr, betas, eps, maximize, foreach, fused: torch's own.
        weight_decay: decoupled, as AdamW's; 0 by default.
        gamma, r_max, beta3: see `VarianceReduced`.
    Source:
        VRGD, sections 4.2 and 6.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gamma: float = 0.1,
        r_max: float = 1.0,
        beta3: float | None = 0.9,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        base = AdamW(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        super().__init__(base, gamma=gamma, r_max=r_max, beta3=beta3)
