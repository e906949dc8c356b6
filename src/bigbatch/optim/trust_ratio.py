"""LARS and LAMB: a learning rate for each layer, from two norms over the whole layer."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.auto import is_sharded
from bigbatch.gradients.dtypes import FULL_PRECISION, sum_dtype
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.optimizer_settings import Betas, Rate, load_into, rates_of, require_valid
from bigbatch.optim.sharding import AllReduce, all_reduce_of, local
from bigbatch.optim.two_pass import Chunk, TwoPass, require_kernels
from bigbatch.setting_types import Coefficient, PositiveCoefficient, Share, checked
from bigbatch.state_checks import loads_state

Columns = list[tuple[Tensor, ...]]  # the arrays of each layer: theta, gradient, and each state


class LayerShard(NamedTuple):
    """This process's shard of a layer in one step."""

    dimensions: int  # of the layer
    steps: float  # with this one; 0 if they are not counted
    arrays: list[Tensor]  # theta, its gradient, and the state in the order of `_state_names`


class ShardedParameters(Protocol):
    """The layers in an engine's flat tensors, which the optimizer steps in place of parameters."""

    all_reduce: AllReduce | None  # of values of layers; None if every rank has whole layers

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """The dimensions and the shard, maybe empty, of each layer; in one order on all ranks."""


class TrustRatioOptimizer(Optimizer):
    """A torch optimizer in two passes over each layer: norms, then the step that they scale.

    A layer is a parameter tensor; under fully_shard the norms are those of the whole tensor.
    Parameters of at most one dimension (biases, normalization) have no decay and no trust ratio if
    their group has `exclude_bias_and_norm`.
    """

    _state_names: tuple[str, ...]  # of the state that has the parameter's shape
    partition: ShardedParameters | None = None  # set by an engine whose parameters are not layers

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        require_kernels(defaults["fused"])
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Raises:
            SettingError: a value is outside its range, or a parameter is complex or sparse.
        """
        super().add_param_group(param_group)
        try:
            require_valid(self.param_groups[-1], type(self))
        except SettingError:
            self.param_groups.pop()
            raise

    @_disable_dynamo  # torch.compiler.disable would import the compiler
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes a step; `closure` computes the loss, calls `backward()` and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates_of(self)  # checks them
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if sparse := [g.layout for g in gradients if g.layout != torch.strided]:
            raise GradientError(
                f"{type(self).__name__} does not support gradients of layout {sparse[0]}; use "
                "embeddings with sparse=False, or another optimizer"
            )
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                whose = self.partition
                all_reduce = all_reduce_of(parameters) if whose is None else whose.all_reduce
                shards = [shard for p in parameters for shard in self._shards(p)]
                min_dimensions = 2 if group["exclude_bias_and_norm"] else 0
                for adapts in (True, False):
                    part = [s for s in shards if (s.dimensions >= min_dimensions) is adapts]
                    if part:
                        columns = list(zip(*(shard.arrays for shard in part), strict=True))
                        steps = [shard.steps for shard in part]
                        passes = self._passes(columns, steps, group, adapts=adapts)
                        fused = group["fused"] is not False
                        passes.run(fused=fused, all_reduce=all_reduce if adapts else None)
        return loss

    @loads_state
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state like torch, but keeps its float32 type for parameters of a half type."""
        load_into(self, super().load_state_dict, state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            state = self.state.get(parameter, {})
            for name, value in state_dict["state"].get(key, {}).items():
                if value.dtype in FULL_PRECISION and state[name].dtype not in FULL_PRECISION:
                    state[name] = value.to(parameter.device, copy=True)

    def _shards(self, parameter: Tensor) -> list[LayerShard]:
        """The shard of a parameter, or of each layer in an engine's; initializes the state."""
        state = self.state[parameter]
        if not all(map(state.__contains__, self._state_names)):
            state.update(self._init_state(parameter))
        steps = float(state["step"].add_(1)) if "step" in state else 0.0
        assert parameter.grad is not None
        tensors = [parameter, parameter.grad, *map(state.__getitem__, self._state_names)]
        if self.partition is None:
            arrays = list(map(local, tensors)) if is_sharded(parameter) else tensors
            return [LayerShard(parameter.ndim, steps, arrays)]
        layers = zip(*(self.partition.cut(parameter, tensor) for tensor in tensors), strict=True)
        return [LayerShard(cut[0][0], steps, [shard for _, shard in cut]) for cut in layers]

    @abstractmethod
    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def _passes(
        self, columns: Columns, steps: list[float], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        """The step over the arrays of some layers, with decay and trust ratio if `adapts`."""


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
        weight_decay: Coefficient = 0.0,
        *,
        trust_coefficient: PositiveCoefficient = 0.001,
        nesterov: bool = False,
        exclude_bias_and_norm: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        if nesterov and not momentum:
            raise SettingError("nesterov=True needs a momentum")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            nesterov=nesterov,
            exclude_bias_and_norm=exclude_bias_and_norm,
            maximize=maximize,
            fused=fused,
        )

    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _passes(
        self, columns: Columns, steps: list[float], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        lr, trust = float(group["lr"]), group["trust_coefficient"]
        decay = group["weight_decay"] if adapts else 0.0
        momentum, nesterov = group["momentum"], group["nesterov"]
        sign = -1.0 if group["maximize"] else 1.0

        def step(chunk: Chunk, sums: Tensor) -> None:
            theta, gradient, buffer = map(chunk.flat, range(3))
            rate: Tensor | float = 1.0
            if adapts:
                weight, norm = sums.sqrt().T
                rates = functional.lars_rate(weight, norm, decay, trust)
                rate = chunk.spread(rates.to(sum_dtype(theta.dtype)))
            gradient = sign * gradient
            functional.lars_step(theta, gradient, buffer, lr * rate, decay, momentum, nesterov)
            chunk.write(0, theta)
            chunk.write(2, buffer)

        return TwoPass(
            native.Rule.LARS,
            columns,
            layer_values=[(0.0, 0.0)] * len(steps),
            group_values=[lr, decay, sign, adapts, momentum, trust, nesterov],
            first_pass=lambda chunk: chunk.squares(chunk.flat(0), chunk.flat(1)),
            second_pass=step,
        )


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
        eps: PositiveCoefficient = 1e-6,
        weight_decay: Coefficient = 0.01,
        *,
        exclude_bias_and_norm: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            exclude_bias_and_norm=exclude_bias_and_norm,
            maximize=maximize,
            fused=fused,
        )

    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(parameter, dtype=sum_dtype(parameter.dtype))
        step = torch.tensor(0.0, dtype=torch.float32)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": step}

    def _passes(
        self, columns: Columns, steps: list[float], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        (beta1, beta2), eps, lr = group["betas"], group["eps"], float(group["lr"])
        corrections = [(1 - beta1**t, 1 - beta2**t) for t in steps]
        decay = group["weight_decay"] if adapts else 0.0
        sign = -1.0 if group["maximize"] else 1.0

        def direction(chunk: Chunk, theta: Tensor, m: Tensor, v: Tensor) -> Tensor:
            pair = chunk.spread_value(0, m), chunk.spread_value(1, m)
            return functional.lamb_direction(theta, m, v, pair, eps, decay)

        def moments(chunk: Chunk) -> Tensor:
            theta, gradient, m, v = map(chunk.flat, range(4))
            functional.lamb_moments(sign * gradient, m, v, beta1, beta2)
            chunk.write(2, m)
            chunk.write(3, v)
            return chunk.squares(theta, direction(chunk, theta, m, v))

        def step(chunk: Chunk, sums: Tensor) -> None:
            theta, m, v = chunk.flat(0), chunk.flat(2), chunk.flat(3)
            rate: Tensor | float = 1.0
            if adapts:
                rate = chunk.spread(functional.lamb_rate(*sums.sqrt().T).to(m))
            theta.sub_(direction(chunk, theta, m, v) * (lr * rate))
            chunk.write(0, theta)

        return TwoPass(
            native.Rule.LAMB,
            columns,
            layer_values=corrections,
            group_values=[lr, decay, sign, adapts, beta1, beta2, eps],
            first_pass=moments,
            second_pass=step,
        )
