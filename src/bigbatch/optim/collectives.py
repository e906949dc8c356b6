"""Flat tensors scattered over ranks and gathered again: all-to-all, then all-gather.

Together they send what an all-reduce sends, and in between every rank has its own elements of all.
"""

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

_c10d: Any = dist  # torch 2.13 renamed it; its stubs know one name only
_all_gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor


@dataclass(frozen=True)
class Level:
    """A group of ranks that scatter and gather among themselves.

    Args:
        group: they.
        rank: of this process in it.
        members: for each of them, the ranks of the whole whose sum it brings along.
    """

    group: dist.ProcessGroup
    rank: int
    members: list[list[int]]


class Chunk:
    """A run of a flat tensor, of which this rank has a shard.

    Args:
        start, stop: of the run.
        levels: the ranks share it by the first, what each then has by the second.
    """

    def __init__(self, start: int, stop: int, levels: list[Level]) -> None:
        self.start, self.stop = start, stop
        self.shard = slice(start, stop)  # of the whole flat tensor
        self._levels = levels
        self._cuts: list[list[int]] = []  # elements of each member, by level
        for level in levels:
            at, length = self.shard.start, self.shard.stop - self.shard.start
            each = -(-length // len(level.members))
            cuts = [max(0, min(each, length - i * each)) for i in range(len(level.members))]
            at += sum(cuts[: level.rank])
            self.shard = slice(at, at + cuts[level.rank])
            self._cuts.append(cuts)

    def scatter(self, values: Tensor, level: int) -> Callable[[], Tensor]:
        """Sends every member its part, and waits, when called, for what they send.

        Args:
            values: what this rank has, flat: of the run, or of its shard of the level before.
            level: among whose members.
        Returns:
            Gives this rank's part of every member's values, (members, elements).
        """
        cuts, members = self._cuts[level], len(self._levels[level].members)
        size = cuts[self._levels[level].rank]
        rows = values.new_empty(members * size)
        work = dist.all_to_all_single(
            rows, values, [size] * members, cuts, self._levels[level].group, async_op=True
        )

        def received() -> Tensor:
            work.wait()
            return rows.view(members, size)

        return received

    def gather(self, shard: Tensor, whole: Tensor) -> Callable[[], None]:
        """Writes everybody's shards to `whole`, the run as a flat tensor, by the end of a call."""
        for level in range(len(self._levels) - 1, 0, -1):
            length = sum(self._cuts[level])
            out = shard.new_empty(length)
            self._gather(level, shard, out)()
            shard = out
        return self._gather(0, shard, whole)

    def _gather(self, level: int, shard: Tensor, whole: Tensor) -> Callable[[], None]:
        each, members = max(self._cuts[level]), len(self._levels[level].members)
        even = each * members == whole.numel()
        out = whole if even else whole.new_empty(each * members)
        if len(shard) < each:
            shard = torch.cat([shard, shard.new_zeros(each - len(shard))])
        work = _all_gather(out, shard, group=self._levels[level].group, async_op=True)

        def gathered() -> None:
            work.wait()
            if not even:
                whole.copy_(out[: whole.numel()])

        return gathered


def levels_of(group: dist.ProcessGroup, node_group: dist.ProcessGroup | None) -> list[Level]:
    """One level, or two where the ranks of a node are given. Collective.

    Raises:
        SettingError: nodes of different sizes, or ranks outside them.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if node_group is None:
        if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks and rank == 0:
            warnings.warn(
                "there are several nodes, and every rank sends raw gradients to each of them; pass "
                "attach(node_group=), a process group of the ranks of this node",
                stacklevel=4,
            )
        return [Level(group, rank, [[each] for each in range(ranks)])]
    numbers = {each: i for i, each in enumerate(dist.get_process_group_ranks(group))}
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, dist.get_process_group_ranks(node_group), group=group)
    nodes = [list(node) for node in dict.fromkeys(map(tuple, found))]
    everybody = sorted(itertools.chain.from_iterable(nodes))
    if len({len(node) for node in nodes}) > 1 or everybody != sorted(numbers):
        raise SettingError(
            f"node_group= has the ranks {nodes} over the nodes, of which each rank of {ranks} must "
            "be in one, and every node have as many; leave node_group out"
        )
    place = dist.get_rank(node_group)
    inside = Level(node_group, place, [[numbers[each]] for each in found[rank]])
    if len(nodes) == 1:
        return [inside]
    between = new_group(
        group, [list(those) for those in zip(*nodes, strict=True)], dist.get_backend(node_group)
    )
    node_of = {node[place]: node for node in nodes}  # by its rank among those that talk
    members = [
        [numbers[each] for each in node_of[talks]]
        for talks in dist.get_process_group_ranks(between)
    ]
    return [inside, Level(between, dist.get_rank(between), members)]


def new_group(group: dist.ProcessGroup, parts: list[list[int]], backend: str) -> dist.ProcessGroup:
    """A group for the part of the ranks that this one is in. Collective over `group`.

    Where that is not all of the world, torch names it by how many groups a rank is in, so every
    rank of it must be in as many.
    """
    alone = dist.get_world_size(group) < dist.get_world_size()
    groups: list[Any] = [
        dist.new_group(part, backend=backend, use_local_synchronization=alone)
        for part in parts
        if dist.get_rank() in part or not alone
    ]
    members = [part for part in parts if dist.get_rank() in part or not alone]
    own: dist.ProcessGroup = groups[[dist.get_rank() in part for part in members].index(True)]
    return own
