"""p, the momentum of r: state next to the base optimizer's, saved with each parameter."""

from collections import ChainMap
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import StateError
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.optim.sharding import local, sharded_like

_AVERAGE = "gsnr_average"
_STEPS = "gsnr_steps"


class GsnrMomentum:
    """p and the number of its steps, by parameter; of a sharded one, this rank's shard."""

    def __init__(self) -> None:
        self._state: dict[Tensor, tuple[Tensor, int]] = {}

    def __getstate__(self) -> list[tuple[Tensor, tuple[Tensor, int]]]:
        return list(self._state.items())

    def __setstate__(self, state: list[tuple[Tensor, tuple[Tensor, int]]]) -> None:
        self._state = dict(state)

    def next(self, parameter: Tensor, beta3: float) -> tuple[Tensor, float]:
        """(p, 1 / (1 - beta3^t)) of the step that is about to be taken."""
        self.make(parameter)
        average, t = self._state[parameter]
        self._state[parameter] = average, t + 1
        return average, 1 / (1 - beta3 ** (t + 1))

    def of(self, parameter: Tensor) -> tuple[Tensor | None, int]:
        """p of a parameter and the number of its steps; None and 0 before the first."""
        return self._state.get(parameter, (None, 0))

    def put(self, parameter: Tensor, average: Tensor, steps: int) -> None:
        """p and the number of its steps, as they are now."""
        self._state[parameter] = average, steps

    def drop(self, parameter: Tensor) -> None:
        """It is kept elsewhere."""
        self._state.pop(parameter, None)

    def make(self, parameter: Tensor) -> None:
        """p before the first step: zeros, float32 at least."""
        if parameter not in self._state:
            shard = local(parameter)
            zeros = torch.zeros_like(shard, dtype=sum_dtype(shard.dtype), requires_grad=False)
            self._state[parameter] = zeros, 0

    def entries(self, parameter: Tensor) -> dict[str, Tensor | None]:
        """What is saved of a parameter: p, sharded as it is, and its steps; None where not here."""
        if parameter not in self._state:
            return {_AVERAGE: None, _STEPS: None}
        shard, steps = self._state[parameter]
        steps_ = torch.tensor(float(steps), dtype=torch.float32)
        return {_AVERAGE: sharded_like(parameter, shard), _STEPS: steps_}

    def begun(self) -> Collection[Tensor]:
        """The parameters whose p is here."""
        return self._state.keys()

    def add_to(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Puts p, sharded as its parameter is, and the number of its steps with the base's."""
        for index, parameter in enumerate(parameters):
            if parameter in self._state:
                state_dict["state"].setdefault(index, {}).update(self.entries(parameter))

    def take_from(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Loads what `add_to` put there, and returns the base optimizer's part.

        Raises:
            StateError: something is of another shape than its parameter, or it was saved with p,
                and p is not in it.
        """
        groups, saved = state_dict["param_groups"], state_dict["state"]
        keys = [key for group in groups for key in group["params"]]  # numbers, or names
        if len(keys) != len(parameters):
            return state_dict  # which the base optimizer refuses
        of_key = dict(zip(keys, parameters, strict=True))
        states = {key: _present(state) for key, state in saved.items() if key in of_key}
        shared = {key: state for key, state in saved.items() if key not in of_key}
        for key, state in states.items():
            if state.get(_AVERAGE) is not None:
                self._state[of_key[key]] = _unpacked(state, of_key[key])
        rest = {
            key: {name: value for name, value in state.items() if name not in (_AVERAGE, _STEPS)}
            for key, state in states.items()
        }
        for group in groups:
            own = [(key, of_key[key]) for key in group["params"] if rest.get(key)]
            if group.get("beta3") is not None and group["vr"]:
                _require_present([key for key, parameter in own if parameter not in self._state])
            if group.get("fused"):  # torch's fused steps write where too small a state is not
                for key, parameter in own:
                    _require_shape(rest[key], parameter)
        kept = {key: state for key, state in rest.items() if state}
        return {**state_dict, "state": kept | shared}


class StateWithGsnrMomentum(MutableMapping[Tensor, Any]):
    """A base optimizer's `state`, where p has its place with each parameter that has one.

    Torch's distributed checkpoints ask it for the names of what is saved of a parameter.

    Args:
        base: the base optimizer's own; writes to a parameter's state go to it.
        averages: p.
        averaged: the parameters of which there is one, or will be.
    """

    def __init__(
        self,
        base: MutableMapping[Tensor, Any],
        averages: GsnrMomentum,
        averaged: Collection[Tensor],
    ) -> None:
        self._base, self._averages, self._averaged = base, averages, averaged

    def __getitem__(self, parameter: Tensor) -> Any:
        state = self._base[parameter]
        if parameter not in self._averaged:
            return state
        return ChainMap(state, self._averages.entries(parameter))

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        rest = {name: value for name, value in state.items() if name not in (_AVERAGE, _STEPS)}
        self._base[parameter] = rest
        if state.get(_AVERAGE) is not None:
            self._averages.put(parameter, local(state[_AVERAGE]), int(state[_STEPS]))

    def __delitem__(self, parameter: Tensor) -> None:
        self._base.pop(parameter, None)
        self._averages.drop(parameter)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._base or parameter in self._averages.begun()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys([*self._base, *self._averages.begun()]))

    def __len__(self) -> int:
        return len(self._base.keys() | self._averages.begun())


def _present(state: dict[str, Any]) -> dict[str, Any]:
    """Without what torch's distributed checkpoints put where they found nothing."""
    return {name: x for name, x in state.items() if not isinstance(x, dict) or x}


def _unpacked(state: dict[str, Any], parameter: Tensor) -> tuple[Tensor, int]:
    _require_shape({_AVERAGE: state[_AVERAGE]}, parameter)
    average = local(state[_AVERAGE])
    return average.to(parameter.device, sum_dtype(parameter.dtype), copy=True), int(state[_STEPS])


def _require_present(lost: list[Any]) -> None:
    if lost:
        raise StateError(
            f"the state of {len(lost)} parameters, {lost[0]!r} the first, was saved with a beta3 "
            f"and holds no {_AVERAGE}, the average of r: something between state_dict() and "
            "load_state_dict() left it out; save all that state_dict() gives"
        )


def _require_shape(state: dict[str, Any], parameter: Tensor) -> None:
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StateError(
                f"{name} was saved for a parameter of shape {tuple(value.shape)}, this one has "
                f"{tuple(parameter.shape)}; leave its state out"
            )
