"""Moments, momentum, options and warnings of a variance-reduced optimizer, for any scaling.

p, the momentum of r, is kept apart from the base optimizer's state, as many make theirs where it is
empty, and is saved with it.
"""

import math
from collections import ChainMap
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import StateError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.loop_warning import warn_in_loop
from bigbatch.optim.apply_gsnr import AppliedGsnr
from bigbatch.optim.sharding import local, sharded_like
from bigbatch.statistics.second_moment import GradientMoments, SumsOf

_RANGE_INTERVAL = 16  # steps; on a GPU a check waits for the device
_RECOMMENDED_K = 8  # with fewer, the ratio's variance is infinite or nearly so
_AVERAGE, _STEPS = "gsnr_average", "gsnr_steps"


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

        Raises StateError if p, or what a fused step writes to, has another shape than its
        parameter, or if p is missing from a state that was saved with beta3.
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
    """A base optimizer's `state`, with the entries of p, for torch's distributed checkpoints."""

    base: MutableMapping[Tensor, Any]  # the base optimizer's state
    momentum: GsnrMomentum
    parameters: Collection[Tensor]  # that have p, or will have it

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


class GsnrState:
    """The state of one variance-reduced optimizer, by whose name errors call it."""

    sums_of: SumsOf  # S of parameters, of the source that the moments are of

    def __init__(self, base: Optimizer, name: str, *, watch: bool, fused: bool | None) -> None:
        self.base, self.name, self.watch, self.fused = base, name, watch, fused
        self.vr_parameters: dict[Tensor, None] = {}  # those of the groups with vr, in order
        self.uses_kernels = fused is not False  # where they fit
        self.momentum = GsnrMomentum()
        self.moments = GradientMoments(self.vr_parameters.keys(), fused=self.uses_kernels)
        self._steps = 0
        self._warned_of_range = False

    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in the order of the state dict."""
        return [parameter for group in self.base.param_groups for parameter in group["params"]]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters with their names, or with their numbers if they have none."""
        named: list[tuple[str, Tensor]] = []
        for group in self.base.param_groups:
            parameters = group["params"]
            names = group.get("param_names", [""] * len(parameters))
            named += zip(names, parameters, strict=True)
        return [(name or str(number), p) for number, (name, p) in enumerate(named)]

    @property
    def checks_agreement(self) -> bool:
        """Whether this step checks if all gradients agree, which waits for the device."""
        return not self._steps

    @property
    def checks_range(self) -> bool:
        """Whether this step checks the range of M2, which waits for the device."""
        return self._steps % _RANGE_INTERVAL == 0 and not self._warned_of_range

    def warn(self, applied: AppliedGsnr) -> None:
        """Warns once if micro-batches all agree, if they are few, or if M2 is out of range."""
        if not self._steps and applied.agree and not applied.out_of_range:
            warn_in_loop(
                "every micro-batch has the same gradient, so r says nothing; is it the same "
                "data, or a gradient that was averaged already?"
            )
        if not self._steps and applied.k < _RECOMMENDED_K:
            warn_in_loop(
                f"k = {applied.k} micro-batches give a poor signal-to-noise ratio: pure noise has "
                f"a mean ratio of 1 / (k - 3); use k >= {_RECOMMENDED_K}"
            )
        if applied.out_of_range and not self._warned_of_range:
            self._warned_of_range = True
            warn_in_loop(_out_of_range(applied.out_of_range, self.named_parameters()))
        self._steps += 1


class GradientScaling(Protocol):
    """Multiplies gradients by r at one point of a step: in `step()`, or inside the all-reduce."""

    def apply(self, source: GradientSource, *, may_step: bool = False) -> AppliedGsnr:
        """Replaces g by r g or p_hat g, once a step; may do the base's step too with `may_step`."""


def _out_of_range(layers: Sequence[Tensor], named_parameters: list[tuple[str, Tensor]]) -> str:
    name = next(name for name, p in named_parameters if p is layers[0])
    dtype = sum_dtype(layers[0].dtype)
    low, high = math.sqrt(torch.finfo(dtype).tiny), math.sqrt(torch.finfo(dtype).max)
    return (
        f"r is not right for {len(set(layers))} layers, {name!r} the first: their micro-batch "
        f"gradients differ by less than {low:.0e} or more than {high:.0e}, and the squares of "
        f"the differences leave {dtype}'s range; multiply the loss by a constant, as a GradScaler "
        "does: r does not change with it"
    )
