"""What ranks send: a process group that counts."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

_c10d: Any = dist  # its stubs lack what a backend needs


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
        """Counts its bytes on the rank that has them."""
        opts = opts or dist.BroadcastOptions()
        if opts.rootRank == self.rank():
            self.note("broadcast", tensors)
        return self.gloo.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Counts the bytes of what this rank has."""
        self.note("all-gather", inputs)
        return self.gloo.allgather(outputs, inputs, opts or _c10d.AllgatherOptions())

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        """Counts the bytes of what this rank has."""
        self.note("all-gather", [own])
        return self.gloo._allgather_base(output, own, opts or _c10d.AllgatherOptions())

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """Counts the bytes of all parts."""
        self.note("reduce-scatter", [whole])
        return self.gloo._reduce_scatter_base(output, whole, opts or _c10d.ReduceScatterOptions())

    def alltoall_base(
        self, output: Tensor, whole: Tensor, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        """Counts the bytes of all parts, its own too."""
        self.note("all-to-all", [whole])
        options = opts or _c10d.AllToAllOptions()
        return self.gloo.alltoall_base(output, whole, outputs, inputs, options)

    # the names that torch 2.13 calls
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        """Not counted."""
        return self.gloo.barrier(opts or _c10d.BarrierOptions())

    def note(self, collective: str, tensors: list[Tensor]) -> None:
        """Adds to the list."""
        self.sent.append((collective, sum(t.numel() * t.element_size() for t in tensors)))


def register() -> None:
    """Makes "counting" the name of a backend."""
    if not hasattr(dist.Backend, "COUNTING"):
        dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])


def counting_groups() -> list[CountingGroup]:
    """Those of this process, whoever made them."""
    groups = _c10d.distributed_c10d._world.pg_map
    return [group for group in groups if isinstance(group, CountingGroup)]


def moved(collective: str, handed: float, ranks: int) -> float:
    """Bytes that leave a rank where a ring does it, from those that it hands over.

    The whole tensor over W ranks: an all-reduce sends 2 (W - 1) / W of it, all-to-all and
    reduce-scatter (W - 1) / W; to an all-gather a rank hands its own part, and W - 1 parts pass
    through it; of a broadcast only the rank that has the tensor is counted.

    Example:
        >>> [moved(c, 12.0, 4) for c in ("all-reduce", "all-to-all", "all-gather", "broadcast")]
        [18.0, 9.0, 36.0, 12.0]
    """
    factors = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1.0, "broadcast": 1.0}
    return handed * factors.get(collective, (ranks - 1) / ranks)
