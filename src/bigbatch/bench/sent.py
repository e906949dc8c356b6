"""What ranks send: a process group that counts."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_RANKS = 2
_c10d: Any = dist  # its stubs lack what a backend needs

Steps = Callable[[Callable[[nn.Module], nn.Module]], Iterator[None]]


class CountingGroup(dist.ProcessGroup):
    """Gloo, and a list of what was sent: (collective, bytes that this rank hands over)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.sent: list[tuple[str, int]] = []
        self.gloo = _c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        """As torch asks for it."""
        return "counting"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """As torch has registered it."""
        name: str = _c10d.distributed_c10d._world.pg_names[self]
        return name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts its bytes."""
        self.note("all-reduce", tensors)
        return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts its bytes."""
        self.note("broadcast", tensors)
        return self.gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts the bytes of what this rank has."""
        self.note("all-gather", inputs)
        return self.gloo.allgather(outputs, inputs, opts or _c10d.AllgatherOptions())

    def note(self, collective: str, tensors: list[Tensor]) -> None:
        """Adds to the list."""
        self.sent.append((collective, sum(t.numel() * t.element_size() for t in tensors)))


def bytes_sent(steps: Steps) -> int:
    """Bytes that each of two processes hands over in the last step of a run under DDP.

    Args:
        steps: yields after every step of the model that it wraps by what it is given.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(_RANKS)]
        processes = [
            context.Process(target=_count, args=(rank, Path(folder) / "store", theirs, steps))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process that counts bytes failed; its error is above")
    return int(pipes[0][0].recv())


def _count(rank: int, store: Path, result: Any, steps: Steps) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # other data on each
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=_RANKS)
    dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
    group: Any = dist.new_group(list(range(_RANKS)), backend="counting")
    last = 0
    for _ in steps(lambda model: DistributedDataParallel(model, process_group=group)):
        last = sum(size for _, size in group.sent)
        group.sent.clear()
    dist.barrier()  # the other may still need this one
    result.send(last)
    os._exit(0)  # gloo's threads and Python's finalization do not get along
