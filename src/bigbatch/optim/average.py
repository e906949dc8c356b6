"""p, the momentum of r: state beside the base optimizer's, saved with each parameter."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import StateError
from bigbatch.measure.devices import full
from bigbatch.optim.ranks import local, sharded_like

_AVERAGE = "gsnr_average"
_STEPS = "gsnr_steps"


class Averages:
    """p and the number of its steps, by parameter; of a sharded one, this rank's piece."""

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

    def make(self, parameter: Tensor) -> None:
        """p before the first step: zeros, float32 at least."""
        if parameter not in self._state:
            piece = local(parameter)
            zeros = torch.zeros_like(piece, dtype=full(piece.dtype), requires_grad=False)
            self._state[parameter] = zeros, 0

    def packed(self, parameter: Tensor) -> dict[str, Tensor]:
        """As tensors for a state dict, p sharded as its parameter is; {} where there is none."""
        if parameter not in self._state:
            return {}
        piece, t = self._state[parameter]
        average = sharded_like(parameter, piece)
        return {_AVERAGE: average, _STEPS: torch.tensor(float(t), dtype=torch.float32)}

    def unpack(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Takes its own out of a parameter's state, and returns the rest.

        Raises:
            StateError: it is that of a parameter of another shape.
        """
        if _AVERAGE in state:
            require_same_shape({_AVERAGE: state[_AVERAGE]}, parameter)
            average = local(state[_AVERAGE])
            average = average.to(parameter.device, full(parameter.dtype), copy=True)
            self._state[parameter] = average, int(state[_STEPS])
        return {name: value for name, value in state.items() if name not in (_AVERAGE, _STEPS)}


def require_same_shape(state: dict[str, Any], parameter: Tensor) -> None:
    """Raises StateError where state, but for the step count, is of another shape."""
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StateError(
                f"{name} was saved for a parameter of shape {tuple(value.shape)}, this one has "
                f"{tuple(parameter.shape)}; leave its state out"
            )
