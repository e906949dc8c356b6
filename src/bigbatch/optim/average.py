"""p, the momentum of r: state beside the base optimizer's, saved with each parameter."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.measure.devices import FULL
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
            dtype = piece.dtype if piece.dtype in FULL else torch.float32
            self._state[parameter] = torch.zeros_like(piece, dtype=dtype, requires_grad=False), 0

    def packed(self, parameter: Tensor) -> dict[str, Tensor]:
        """As tensors for a state dict, p sharded as its parameter is; {} where there is none."""
        if parameter not in self._state:
            return {}
        piece, t = self._state[parameter]
        average = sharded_like(parameter, piece)
        return {_AVERAGE: average, _STEPS: torch.tensor(float(t))}

    def unpack(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Takes its own out of a parameter's state, and returns the rest."""
        if _AVERAGE in state:
            average = local(state[_AVERAGE]).to(parameter.device, copy=True)
            self._state[parameter] = average, int(state[_STEPS])
        return {name: value for name, value in state.items() if name not in (_AVERAGE, _STEPS)}
