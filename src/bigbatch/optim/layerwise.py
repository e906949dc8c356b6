"""What LARS and LAMB share: a rate for every layer, from two norms over the whole of it."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from bigbatch.errors import GradientError, SettingError
from bigbatch.measure.devices import FULL
from bigbatch.optim.options import require_once
from bigbatch.optim.passes import Passes, require_kernels
from bigbatch.optim.ranks import join_of, local

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Layerwise(Optimizer):
    """A torch optimizer in two passes over each layer: norms, then the step that they scale.

    A layer is a parameter tensor; under fully_shard the norms are those of the whole one. Biases
    and norms, that is parameters of at most one dimension, get neither decay nor trust ratio where
    their group has `exclude_bias_and_norm`.
    """

    _names: tuple[str, ...]  # of a parameter's state, in the order that `_passes` takes it

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
                excluded = [bool(group["exclude_bias_and_norm"]) and p.ndim <= 1 for p in chosen]
                for exclude in (False, True):
                    part = [p for p, e in zip(chosen, excluded, strict=True) if e is exclude]
                    if part:
                        passes = self._passes(part, group, adapts=not exclude)
                        join = None if exclude else join_of(part)
                        passes.run(fused=group["fused"] is not False, join=join)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its type where the parameter has a half one."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if value.dtype in FULL and self.state[parameter][name].dtype not in FULL:
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _state(self, parameter: Tensor) -> list[Tensor]:
        """This rank's pieces of its parameter's state, made before the first step."""
        state = self.state[parameter]
        if any(name not in state for name in self._names):
            state.update(self._start(parameter))
        return [local(state[name]) for name in self._names]

    @abstractmethod
    def _start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @abstractmethod
    def _passes(self, parameters: list[Tensor], group: dict[str, Any], *, adapts: bool) -> Passes:
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
        for name in ("lr", "weight_decay"):
            if not (isinstance(group[name], Tensor) or 0 <= group[name] < math.inf):
                raise SettingError(f"{name}={group[name]} must be finite and not negative")
        require_once(group["params"])
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.layout != torch.strided:
                raise SettingError(
                    f"a {parameter.dtype} parameter of layout {parameter.layout} has no trust "
                    "ratio here; give it to an optimizer of its own"
                )


def require_share(**values: float) -> None:
    """Raises SettingError where one does not lie in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise SettingError(f"{name}={value} must lie in [0, 1)")
