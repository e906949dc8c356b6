"""Devices and dtypes of sums."""

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_DEVICE = operator.attrgetter("device")
FULL_PRECISION = (torch.float32, torch.float64)  # dtypes that squares may be summed in


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor to a device; waits only for a copy to the CPU, which the host reads."""
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disables the user's autocast, which would compute sums in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of such tensors: the same if it is in `FULL_PRECISION`, else float32."""
    return dtype if dtype in FULL_PRECISION else torch.float32


def full_precision(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of its sums; itself where that is its own."""
    return tensor if tensor.dtype in FULL_PRECISION else tensor.float()


def widest_float(device: torch.device) -> torch.dtype:
    """The widest float dtype that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stacks 0-dim tensors, in the widest float dtype, on the device of the first."""
    values = stacked(scalars)
    return values.to(widest_float(values.device))


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Stacks 0-dim tensors on the device of the first."""
    device = scalars[0].device
    if len(set(map(_DEVICE, scalars))) > 1:
        scalars = [to_device(s, device) for s in scalars]
    return torch.stack(tuple(scalars))
