"""Where sums are computed, and in which type."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

FULL = (torch.float32, torch.float64)  # types that squares may be summed in


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On another device; waits only where the host is to read it, which has to."""
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """So that sums are not computed in half types where a user's autocast is on."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def full(dtype: torch.dtype) -> torch.dtype:
    """The type itself if it is one of `FULL`, else float32: what state of such tensors has."""
    return dtype if dtype in FULL else torch.float32


def wide(device: torch.device) -> torch.dtype:
    """The widest float type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """0-dim tensors as one of the widest float type, on the device of the first."""
    device = scalars[0].device
    if any(s.device != device or s.dtype != scalars[0].dtype for s in scalars):
        scalars = [moved(s, device, wide(device)) for s in scalars]
    return torch.stack(list(scalars)).to(wide(device))
