"""Bytes that ranks send: a process group that counts them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

_c10d: Any = dist  # its stubs lack what a backend needs


class CountingGroup(dist.ProcessGroup):
    """Gloo with a list of its calls: (collective, bytes of the tensors that this rank passes)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.sent: list[tuple[str, int]] = []
        self.gloo = _c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend, which torch asks for."""
        return "counting"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name of the group in torch's registry."""
        name: str = _c10d.distributed_c10d._world.pg_names[self]
        return name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts the bytes of the tensors."""
        self.count("all-reduce", tensors)
        return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts the bytes of the tensors on the rank that sends them."""
        opts = opts or dist.BroadcastOptions()
        if opts.rootRank == self.rank():
            self.count("broadcast", tensors)
        return self.gloo.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts the bytes of this rank's inputs."""
        self.count("all-gather", inputs)
        return self.gloo.allgather(outputs, inputs, opts or _c10d.AllgatherOptions())

    def _allgather_base(self, output: Tensor, input_: Tensor, opts: Any = None) -> Any:
        """Counts the bytes of this rank's input."""
        self.count("all-gather", [input_])
        return self.gloo._allgather_base(output, input_, opts or _c10d.AllgatherOptions())

    def _reduce_scatter_base(self, output: Tensor, input_: Tensor, opts: Any = None) -> Any:
        """Counts the bytes of the input for all ranks."""
        self.count("reduce-scatter", [input_])
        return self.gloo._reduce_scatter_base(output, input_, opts or _c10d.ReduceScatterOptions())

    def alltoall_base(
        self, output: Tensor, input_: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        """Counts the bytes of the input for all ranks, this one included."""
        self.count("all-to-all", [input_])
        options = opts or _c10d.AllToAllOptions()
        return self.gloo.alltoall_base(output, input_, output_sizes, input_sizes, options)

    # names that torch 2.13 calls
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        """Counts nothing."""
        return self.gloo.barrier(opts or _c10d.BarrierOptions())

    def count(self, collective: str, tensors: list[Tensor]) -> None:
        """Adds a call to the list."""
        self.sent.append((collective, sum(t.numel() * t.element_size() for t in tensors)))


def register() -> None:
    """Registers the backend "counting" with torch."""
    if not hasattr(dist.Backend, "COUNTING"):
        dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])


def counting_groups() -> list[CountingGroup]:
    """All counting groups of this process."""
    groups = _c10d.distributed_c10d._world.pg_map
    return [group for group in groups if isinstance(group, CountingGroup)]


def ring_bytes(collective: str, input_bytes: float, ranks: int) -> float:
    """Bytes that leave a rank in a ring algorithm, from the bytes that it passes to a collective.

    With W ranks, an all-reduce sends 2 (W - 1) / W of the tensor, all-to-all and reduce-scatter
    (W - 1) / W. To an all-gather a rank passes its own part, and sends W - 1 parts. A broadcast
    counts on the rank that has the tensor.

    Example:
        >>> names = ("all-reduce", "all-to-all", "all-gather", "broadcast")
        >>> [ring_bytes(name, 12.0, 4) for name in names]
        [18.0, 9.0, 36.0, 12.0]
    """
    factors = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1.0, "broadcast": 1.0}
    return input_bytes * factors.get(collective, (ranks - 1) / ranks)
