"""How long forwards and backwards of other sizes take, and how many samples memory has room for."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from bigbatch.advisor.forward_watch import ModuleCall, tensors_in
from bigbatch.policies.step_time import StepTime, TimedSize
from bigbatch.training.snapshot import ForwardSnapshot

_FACTORS = (0.25, 1, 4)  # of the samples of a backward
_SLOW_FACTORS = (0.25, 0.5, 1)  # if it takes longer than a second
_SLOW = 1.0
_REPEATS = 5
_SECONDS = 10.0  # from which no further repeat begins
_MARGIN = 0.1  # of memory that is left free


def probe(
    call: ModuleCall, samples_per_row: float, *, copies: bool
) -> tuple[StepTime, int | None, float]:
    """Times forwards and backwards of a quarter, one and four times the samples of a call.

    The loss is the module's own, if it returns one, else a mean of its outputs. Gradients come from
    `autograd.grad`, so `.grad` stays as it is; buffers and random states are restored.

    Args:
        call: the call, without graphs.
        samples_per_row: samples of an entry of its tensors.
        copies: whether to run a copy of the module, which may keep more than buffers.
    Returns:
        Seconds of a forward and backward by samples; the samples for which there is memory beyond
        what is used, an estimate; the bytes that a backward keeps for a sample.
    """
    with repeatable(call, copies=copies) as (module, own):
        one = _Backward(module, call, [p for p in own.values() if p.requires_grad])
        row_bytes = _bytes_kept(one)
        free = _free_bytes(one.device)
        largest = None
        if free is not None and row_bytes:
            largest = call.samples + int((1 - _MARGIN) * free / row_bytes)
        is_slow = _timed(lambda: one.run(resized(call, call.samples)), one.device) > _SLOW
        factors = _SLOW_FACTORS if is_slow else _FACTORS
        sizes = sorted({max(1, round(factor * call.samples)) for factor in factors})
        fitting = [n for n in sizes if n <= call.samples or n * 2 <= (largest or 0)]
        time = _fit(one, fitting, samples_per_row)
    most = None if largest is None else int(largest * samples_per_row)
    return time, most, row_bytes / samples_per_row


@contextmanager
def repeatable(
    call: ModuleCall, *, copies: bool
) -> Iterator[tuple[nn.Module, dict[Tensor, Tensor]]]:
    """What makes a call again: its module, or a copy, whose parameters are given by the module's.

    Nothing is reduced over ranks. Buffers and random states are restored at the end.
    """
    module = call.module
    if isinstance(module, DistributedDataParallel):
        module = module.module
    again = copy.deepcopy(module) if copies else module
    own = dict[Tensor, Tensor](zip(module.parameters(), again.parameters(), strict=True))
    device = next(iter(own)).device.type
    with ForwardSnapshot(again), torch.enable_grad(), call.autocast(device):
        yield again, own


def resized(call: ModuleCall, samples: int, first: int = 0) -> tuple[Any, Any]:
    """The call's arguments, cut or repeated along their samples, from the first one of a part."""
    own = call.samples

    def resize(leaf: Tensor) -> Tensor:
        dim = next((d for d in (call.dim, 0) if leaf.shape[d : d + 1] == (own,)), None)
        if dim is None:
            return leaf
        return torch.cat([leaf] * -(-samples // own), dim).narrow(dim, first, samples)

    return tree_map_only(Tensor, resize, (call.args, call.kwargs))  # type: ignore[no-any-return]


class _Backward:
    """A forward and backward of any number of samples."""

    def __init__(self, module: nn.Module, call: ModuleCall, parameters: Sequence[Tensor]) -> None:
        self.module, self.call, self.parameters = module, call, parameters
        self.device = parameters[0].device

    def forward(self, inputs: tuple[Any, Any]) -> Tensor:
        """The loss."""
        output = self.module(*inputs[0], **inputs[1])
        floats = [x for x in tensors_in(output) if x.requires_grad]
        losses = [x for x in floats if not x.dim()]
        return losses[0] if losses else torch.stack([x.float().mean() for x in floats]).sum()

    def run(self, inputs: tuple[Any, Any]) -> None:
        """Both."""
        torch.autograd.grad(self.forward(inputs), self.parameters, allow_unused=True)


def _fit(one: _Backward, sizes: Sequence[int], samples_per_row: float) -> StepTime:
    inputs = {n: resized(one.call, n) for n in sizes}
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    began = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for n in sizes:
            elapsed = _timed(lambda n=n: one.run(inputs[n]), one.device)  # type: ignore[misc]
            if repeat:  # the first fills caches
                seconds[n].append(elapsed)
        if repeat and time.perf_counter() - began > _SECONDS:
            break
    # the least of some repeats: other processes only add to it
    timed = [TimedSize(n * samples_per_row, min(t), _REPEATS) for n, t in seconds.items()]
    least = timed[0].batch_size
    return StepTime.fit(timed) or StepTime(0.0, timed[0].seconds / least, least, least)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    began = _time_on(device)
    run()
    return _time_on(device) - began


def _time_on(device: torch.device) -> float:
    """The time at which the device has done what it was given, which is waited for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _bytes_kept(one: _Backward) -> float:
    """Bytes that a backward keeps for one sample: all it saves that is no parameter."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in one.module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = one.forward(resized(one.call, one.call.samples))
    del loss
    return sum(kept.values()) / one.call.samples


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on the device, without what torch has in reserve."""
    if device.type == "cpu":
        return _free_host_bytes()
    memory = torch.accelerator
    try:
        free = memory.get_memory_info(device)[0]
        return free + memory.memory_reserved(device) - memory.memory_allocated(device)
    except RuntimeError:  # torch cannot say for this kind of device
        return None


def _free_host_bytes() -> int | None:
    """Available memory of the machine, or of the container if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # there is no limit
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
