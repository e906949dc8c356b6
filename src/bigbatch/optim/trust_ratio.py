"""The common part of LARS and LAMB: a rate for each layer, from two norms over the whole layer."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.optim.gsnr_options import require_kinds, require_unique
from bigbatch.optim.sharding import AllReduce, all_reduce_of, local
from bigbatch.optim.two_pass import TwoPass, require_kernels


class ParameterShard(NamedTuple):
    """This process's shard of a layer in one step."""

    # theta, gradient: the elements of the shard
    theta: Tensor
    gradient: Tensor
    state: list[Tensor]  # their state, in the order of the optimizer's `_state_names`
    steps: float  # steps of the layer, this one included; 0 if the optimizer does not count them
    dimensions: int  # dimensions of the layer


class ShardedParameters(Protocol):
    """The layers in an engine's flat tensors, which the optimizer steps in place of parameters."""

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """(dimensions of a layer, its shard) for each layer in a tensor like `flat`.

        All ranks have the same layers in the same order; a shard may be empty.
        """

    @property
    def all_reduce(self) -> AllReduce | None:
        """Sums values of layers over the ranks; None if every rank has whole layers."""


class TrustRatioOptimizer(Optimizer):
    """A torch optimizer in two passes over each layer: norms, then the step that they scale.

    A layer is a parameter tensor; under fully_shard the norms are those of the whole tensor.
    Parameters of at most one dimension (biases, normalization) have no decay and no trust ratio if
    their group has `exclude_bias_and_norm`.
    """

    _state_names: tuple[str, ...]  # of the state that has the parameter's shape
    partition: ShardedParameters | None = None  # set by an engine whose parameters are not layers

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        require_kernels(defaults["fused"])
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Raises:
            SettingError: a value is outside its range, or a parameter is complex or sparse.
        """
        super().add_param_group(param_group)
        try:
            self._require_valid(self.param_groups[-1])
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
        self._require_dense_gradients()
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                layout = self.partition
                all_reduce = layout.all_reduce if layout is not None else all_reduce_of(parameters)
                shards = [shard for p in parameters for shard in self._shards(p)]
                min_dimensions = 2 if group["exclude_bias_and_norm"] else 0
                for adapts in (True, False):
                    part = [s for s in shards if (s.dimensions >= min_dimensions) is adapts]
                    if part:
                        passes = self._passes(part, group, adapts=adapts)
                        fused = group["fused"] is not False
                        passes.run(fused=fused, all_reduce=all_reduce if adapts else None)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state like torch, but keeps its float32 type for parameters of a half type."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if (
                    value.dtype in FULL_PRECISION
                    and self.state[parameter][name].dtype not in FULL_PRECISION
                ):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _shards(self, parameter: Tensor) -> list[ParameterShard]:
        """The shard of a parameter, or of each layer in an engine's; initializes the state."""
        state = self.state[parameter]
        if any(name not in state for name in self._state_names):
            state.update(self._init_state(parameter))
        steps = float(state["step"].add_(1)) if "step" in state else 0.0
        assert parameter.grad is not None
        tensors = [parameter, parameter.grad, *(state[name] for name in self._state_names)]
        if self.partition is None:
            theta, gradient, *local_state = map(local, tensors)
            return [ParameterShard(theta, gradient, local_state, steps, parameter.ndim)]
        layers = zip(*(self.partition.cut(parameter, tensor) for tensor in tensors), strict=True)
        return [
            ParameterShard(theta, gradient, [shard for _, shard in layer_state], steps, dimensions)
            for (dimensions, theta), (_, gradient), *layer_state in layers
        ]

    @abstractmethod
    def _init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def _passes(
        self, shards: list[ParameterShard], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        """The step over some layers of a group, with decay and trust ratio if `adapts`."""

    def _require_dense_gradients(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        for gradient in gradients:
            if gradient is not None and gradient.layout != torch.strided:
                raise GradientError(
                    f"{type(self).__name__} does not support gradients of layout "
                    f"{gradient.layout}; use embeddings with sparse=False, or another optimizer"
                )

    def _require_valid(self, group: dict[str, Any]) -> None:
        require_kinds(group, type(self))
        require_unique(group["params"])
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.layout != torch.strided:
                raise SettingError(
                    f"{type(self).__name__} does not support a {parameter.dtype} parameter of "
                    f"layout {parameter.layout}; put it into another optimizer"
                )
