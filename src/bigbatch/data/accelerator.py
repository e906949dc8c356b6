"""The accelerator of the process, of any kind: its generators and its memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Accelerator:
    """The accelerator that torch knows of in this process: CUDA, XPU, MPS, or another."""

    def __init__(self) -> None:
        device = torch.accelerator.current_accelerator()
        self.kind = "" if device is None else device.type
        self._module: Any = None if device is None else torch.get_device_module(device)
        # None where it is not known, as of MPS
        self._is_initialized = getattr(self._module, "is_initialized", None)

    @property
    def in_use(self) -> bool:
        """Whether this process uses it."""
        if self._is_initialized is None:
            return self._module is not None
        return bool(self._is_initialized())

    def random_states(self) -> dict[str, list[Tensor]]:
        """The states of its devices' generators, by its kind; empty if it is not in use."""
        if not self.in_use:
            return {}
        devices = range(self._module.device_count())
        return {self.kind: [self._module.get_rng_state(device) for device in devices]}

    def restore_random_states(self, state: Mapping[str, Any]) -> None:
        """Restores its generators, as far as the state has any of this kind."""
        if self._module is not None:
            states = state.get(self.kind, [])
            for device, value in zip(range(self._module.device_count()), states, strict=False):
                self._module.set_rng_state(value.cpu(), device)

    def seed(self, seed: int) -> None:
        """Seeds its generators, if it is in use."""
        if self.in_use:
            seed_all = getattr(self._module, "manual_seed_all", None) or self._module.manual_seed
            seed_all(seed)

    def empty_cache(self) -> None:
        """Returns memory that torch does not need to it, if it is in use."""
        if self.in_use and (empty := getattr(self._module, "empty_cache", None)) is not None:
            empty()
