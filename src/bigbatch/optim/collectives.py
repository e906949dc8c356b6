"""Flat tensors scattered over ranks and gathered again: all-to-all, then all-gather."""

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.errors import SettingError

_c10d: Any = dist  # torch 2.13 renamed the function, and its stubs have one name only
_all_gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor


@dataclass(frozen=True)
class Level:
    """A process group in which tensors are scattered and gathered."""

    group: dist.ProcessGroup  # the process group
    rank: int  # the rank of this process in the group
    # for each rank of the group, the ranks of the DDP group whose sum it contributes
    members: list[list[int]]


class Chunk:
    """A slice of a flat tensor, of which this rank has a shard.

    Args:
        whole: the slice.
        levels: the groups that scatter it, one after the other.
        offset: where its shard begins among this rank's shards.
    """

    def __init__(self, whole: slice, levels: list[Level], offset: int) -> None:
        self.whole = self.shard = whole  # in the flat tensor
        self._levels = levels
        self._sizes: list[list[int]] = []  # elements of each rank, by level
        for level in levels:
            length = self.shard.stop - self.shard.start
            size = -(-length // len(level.members))
            sizes = [max(0, min(size, length - i * size)) for i in range(len(level.members))]
            start = self.shard.start + sum(sizes[: level.rank])
            self.shard = slice(start, start + sizes[level.rank])
            self._sizes.append(sizes)
        self.among_shards = slice(offset, offset + self.shard.stop - self.shard.start)

    def scatter(self, values: Tensor, level: int) -> Callable[[], Tensor]:
        """Begins to send each rank of a level its part of this rank's values.

        Args:
            values: flat values of the slice, or of this rank's shard at the level before.
            level: the number of the level.
        Returns:
            A function that waits, and returns all ranks' values of this rank's part,
            (ranks, elements).
        """
        sizes, ranks = self._sizes[level], len(self._levels[level].members)
        size = sizes[self._levels[level].rank]
        rows = values.new_empty(ranks * size)
        work = dist.all_to_all_single(
            rows, values, [size] * ranks, sizes, self._levels[level].group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return rows.view(ranks, size)

        return wait

    def gather(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        """Begins to write all ranks' shards to `out`; returns a function that waits for them."""
        for level in range(len(self._levels) - 1, 0, -1):
            larger_shard = shard.new_empty(sum(self._sizes[level]))
            self._gather(level, shard, larger_shard)()
            shard = larger_shard
        return self._gather(0, shard, out)

    def _gather(self, level: int, shard: Tensor, out: Tensor) -> Callable[[], None]:
        size, ranks = max(self._sizes[level]), len(self._levels[level].members)
        is_even = size * ranks == out.numel()
        padded = out if is_even else out.new_empty(size * ranks)
        if len(shard) < size:
            shard = torch.cat([shard, shard.new_zeros(size - len(shard))])
        work = _all_gather(padded, shard, group=self._levels[level].group, async_op=True)

        def wait() -> None:
            work.wait()
            if not is_even:
                out.copy_(padded[: out.numel()])

        return wait


def levels_of(group: dist.ProcessGroup, node_group: dist.ProcessGroup | None) -> list[Level]:
    """One level, or two with the ranks of a node. Collective."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if node_group is None:
        if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks and rank == 0:
            warnings.warn(
                "there are several nodes, and every rank sends raw gradients to each of them; pass "
                "attach(node_group=), a process group of the ranks of this node",
                stacklevel=4,
            )
        return [Level(group, rank, [[member] for member in range(ranks)])]
    group_ranks = {world: i for i, world in enumerate(dist.get_process_group_ranks(group))}
    node_of_rank: list[Any] = [None] * ranks
    dist.all_gather_object(node_of_rank, dist.get_process_group_ranks(node_group), group=group)
    nodes = [list(node) for node in dict.fromkeys(map(tuple, node_of_rank))]
    all_ranks = sorted(itertools.chain.from_iterable(nodes))
    if len({len(node) for node in nodes}) > 1 or all_ranks != sorted(group_ranks):
        raise SettingError(
            f"node_group= has the ranks {nodes} over the nodes, but each of the {ranks} ranks must "
            "be in one node, and all nodes must have equally many; leave node_group out"
        )
    node_rank = dist.get_rank(node_group)
    within = Level(node_group, node_rank, [[group_ranks[world]] for world in node_of_rank[rank]])
    if len(nodes) == 1:
        return [within]
    between = new_group(
        group, [list(peers) for peers in zip(*nodes, strict=True)], dist.get_backend(node_group)
    )
    node_with = {node[node_rank]: node for node in nodes}  # by its rank in `between`
    members = [
        [group_ranks[world] for world in node_with[peer]]
        for peer in dist.get_process_group_ranks(between)
    ]
    return [within, Level(between, dist.get_rank(between), members)]


def new_group(group: dist.ProcessGroup, parts: list[list[int]], backend: str) -> dist.ProcessGroup:
    """The new group of the part that this rank is in. Collective over `group`.

    If `group` is not the whole world, torch names the new group by the number of groups that a rank
    is in, so that number must be equal on all ranks of the part.
    """
    is_subset = dist.get_world_size(group) < dist.get_world_size()
    own_group: dist.ProcessGroup | None = None
    for part in parts:
        is_member = dist.get_rank() in part
        if is_member or not is_subset:
            new = dist.new_group(part, backend=backend, use_local_synchronization=is_subset)
            own_group = new if is_member else own_group
    assert own_group is not None
    return own_group
