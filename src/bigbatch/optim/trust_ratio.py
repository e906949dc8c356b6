"""What LARS and LAMB share: a rate for every layer, from two norms over the whole of it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from bigbatch.errors import GradientError, SettingError
from bigbatch.gradients.dtypes import FULL_PRECISION
from bigbatch.optim.gsnr_options import require_kinds, require_once
from bigbatch.optim.sharding import Join, join_of, local
from bigbatch.optim.two_pass import TwoPass, require_kernels

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ParameterShard:
    """What this process has of a layer in one step.

    Args:
        theta, gradient: its elements.
        state: of them, in the order of the optimizer's names.
        steps: that the layer has had, this one included; 0 where nobody counts.
        dimensions: of the layer.
    """

    theta: Tensor
    gradient: Tensor
    state: list[Tensor]
    steps: float
    dimensions: int


class ShardedParameters(Protocol):
    """How an engine has laid layers end to end in the tensors that it lets the optimizer step."""

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """Shards of a tensor like `flat`, one a layer, in one order on all ranks.

        With the dimensions of the layer, of which this rank may have no element.
        """

    @property
    def join(self) -> Join | None:
        """Adds up numbers of layers over the ranks; None where every rank has all."""


class TrustRatioOptimizer(Optimizer):
    """A torch optimizer in two passes over each layer: norms, then the step that they scale.

    A layer is a parameter tensor; under fully_shard the norms are those of the whole one. Biases
    and norms, that is parameters of at most one dimension, get neither decay nor trust ratio where
    their group has `exclude_bias_and_norm`.
    """

    _names: tuple[str, ...]  # of a parameter's state that is shaped as it is
    partition: ShardedParameters | None = None  # an engine's, where parameters are no layers

    def __init__(self, params: Parameters, defaults: dict[str, Any]) -> None:
        require_kernels(defaults["fused"])
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            SettingError: a value outside its range, or a parameter that is complex or sparse.
        """
        super().add_param_group(param_group)
        try:
            self._require_valid(self.param_groups[-1])
        except SettingError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # torch.compiler.disable would import the compiler
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; `closure` computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_dense_gradients()
        with torch.no_grad():
            for group in self.param_groups:
                chosen = [p for p in group["params"] if p.grad is not None]
                join = join_of(chosen) if self.partition is None else self.partition.join
                parts = [part for p in chosen for part in self._parts(p)]
                least = 2 if group["exclude_bias_and_norm"] else 0
                for adapts in (True, False):
                    these = [part for part in parts if (part.dimensions >= least) is adapts]
                    if these:
                        passes = self._passes(these, group, adapts=adapts)
                        fused = group["fused"] is not False
                        passes.run(fused=fused, join=join if adapts else None)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its type where the parameter has a half one."""
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

    def _parts(self, parameter: Tensor) -> list[ParameterShard]:
        """A parameter is a layer, or the engine says which it holds; its state is made here."""
        state = self.state[parameter]
        if any(name not in state for name in self._names):
            state.update(self._start(parameter))
        steps = float(state["step"].add_(1)) if "step" in state else 0.0
        assert parameter.grad is not None
        whole = [parameter, parameter.grad, *(state[name] for name in self._names)]
        if self.partition is None:
            theta, gradient, *own_state = map(local, whole)
            return [ParameterShard(theta, gradient, own_state, steps, parameter.ndim)]
        shards = zip(*(self.partition.cut(parameter, tensor) for tensor in whole), strict=True)
        return [
            ParameterShard(theta, gradient, [shard for _, shard in own_state], steps, dimensions)
            for (dimensions, theta), (_, gradient), *own_state in shards
        ]

    @abstractmethod
    def _start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def _passes(
        self, parts: list[ParameterShard], group: dict[str, Any], *, adapts: bool
    ) -> TwoPass:
        """The step over some layers of a group; without decay and trust ratio if not `adapts`."""

    def _require_dense_gradients(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        for gradient in gradients:
            if gradient is not None and gradient.layout != torch.strided:
                raise GradientError(
                    f"a gradient of layout {gradient.layout} has no trust ratio here; use "
                    "embeddings with sparse=False, or give them to an optimizer of their own"
                )

    def _require_valid(self, group: dict[str, Any]) -> None:
        require_kinds(group, type(self))
        require_once(group["params"])
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.layout != torch.strided:
                raise SettingError(
                    f"a {parameter.dtype} parameter of layout {parameter.layout} has no trust "
                    "ratio here; give it to an optimizer of its own"
                )
