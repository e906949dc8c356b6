"""p, the momentum of r: kept apart from the base optimizer's state, and saved with it."""

from collections import ChainMap
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import StateError
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.optim.sharding import local, sharded_like

_AVERAGE = "gsnr_average"
_STEPS = "gsnr_steps"


class GsnrMomentum(dict[Tensor, tuple[Tensor, int]]):
    """(p, number of its steps) by parameter; of a sharded parameter, this rank's shard of p."""

    def next(self, parameters: Sequence[Tensor], beta3: float) -> tuple[list[Tensor], list[float]]:
        """Counts a step of each parameter, and returns its p and 1 / (1 - beta3^t)."""
        entries = [self.get(parameter) or self.make(parameter) for parameter in parameters]
        steps = [t + 1 for _, t in entries]
        averages = [average for average, _ in entries]
        self.update(zip(parameters, zip(averages, steps, strict=True), strict=True))
        return averages, [1 / (1 - beta3**t) for t in steps]

    def make(self, parameter: Tensor) -> tuple[Tensor, int]:
        """Makes p as it is before the first step: zeros, float32 at least."""
        shard = local(parameter)
        zeros = torch.zeros_like(shard, dtype=sum_dtype(shard.dtype), requires_grad=False)
        return self.setdefault(parameter, (zeros, 0))

    def entries(self, parameter: Tensor) -> dict[str, Tensor | None]:
        """The entries of a state dict: p, sharded like its parameter, and its steps, or None."""
        if parameter not in self:
            return {_AVERAGE: None, _STEPS: None}
        shard, steps = self[parameter]
        steps_ = torch.tensor(float(steps), dtype=torch.float32)
        return {_AVERAGE: sharded_like(parameter, shard), _STEPS: steps_}

    def add_to(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Adds the entries of each parameter to the base optimizer's state dict."""
        for index, parameter in enumerate(parameters):
            if parameter in self:
                state_dict["state"].setdefault(index, {}).update(self.entries(parameter))

    def load_from(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Loads what `add_to` has added, and returns the base optimizer's state dict.

        Raises:
            StateError: p, or what a fused step writes to, has another shape than its parameter; or
                p is missing from a state that was saved with beta3.
        """
        groups, saved = state_dict["param_groups"], state_dict["state"]
        keys = [key for group in groups for key in group["params"]]  # numbers, or names
        if len(keys) != len(parameters):
            return state_dict  # the base optimizer refuses it
        by_key = dict(zip(keys, parameters, strict=True))
        base_states = {}
        for key, state in saved.items():
            if key in by_key:
                # distributed checkpoints load an empty dict for a missing value
                state = {name: x for name, x in state.items() if not isinstance(x, dict) or x}
                if state.get(_AVERAGE) is not None:
                    self[by_key[key]] = _loaded_entry(state, by_key[key])
                state = _base_part(state)
            base_states[key] = state
        for group in groups:
            with_state = [(key, by_key[key]) for key in group["params"] if base_states.get(key)]
            missing = [key for key, parameter in with_state if parameter not in self]
            if group.get("beta3") is not None and group["vr"] and missing:
                raise StateError(
                    f"the state of {len(missing)} parameters, {missing[0]!r} the first, was saved "
                    f"with a beta3 and holds no {_AVERAGE}, the average of r: something between "
                    "state_dict() and load_state_dict() left it out; save all that state_dict() "
                    "gives"
                )
            if group.get("fused"):  # torch's fused steps write past the end of a smaller state
                for key, parameter in with_state:
                    _require_shape(base_states[key], parameter)
        non_empty = {k: state for k, state in base_states.items() if state or k not in by_key}
        return {**state_dict, "state": non_empty}


@dataclass(eq=False, repr=False)
class StateWithGsnrMomentum(MutableMapping[Tensor, Any]):
    """A base optimizer's `state`, with the entries of p in the state of each parameter.

    Torch's distributed checkpoints read from it what is saved of a parameter.
    """

    base: MutableMapping[Tensor, Any]  # the base optimizer's state, which writes go to
    momentum: GsnrMomentum  # p
    parameters: Collection[Tensor]  # the parameters that have p, or will have it

    def __getitem__(self, parameter: Tensor) -> Any:
        state = self.base[parameter]
        if parameter not in self.parameters:
            return state
        return ChainMap(state, self.momentum.entries(parameter))

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self.base[parameter] = _base_part(state)
        if state.get(_AVERAGE) is not None:
            self.momentum[parameter] = local(state[_AVERAGE]), int(state[_STEPS])

    def __delitem__(self, parameter: Tensor) -> None:
        self.base.pop(parameter, None)
        self.momentum.pop(parameter, None)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.base or parameter in self.momentum

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys([*self.base, *self.momentum]))

    def __len__(self) -> int:
        return len(self.base.keys() | self.momentum.keys())


def _base_part(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter without the entries of p."""
    return {name: value for name, value in state.items() if name not in (_AVERAGE, _STEPS)}


def _loaded_entry(state: dict[str, Any], parameter: Tensor) -> tuple[Tensor, int]:
    _require_shape({_AVERAGE: state[_AVERAGE]}, parameter)
    average = local(state[_AVERAGE])
    return average.to(parameter.device, sum_dtype(parameter.dtype), copy=True), int(state[_STEPS])


def _require_shape(state: dict[str, Any], parameter: Tensor) -> None:
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StateError(
                f"{name} was saved for a parameter of shape {tuple(value.shape)}, this one has "
                f"{tuple(parameter.shape)}; leave its state out"
            )
