"""Engines on process groups that count what they send."""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from studies import comm_bytes
from training_on_ranks import sharded


@cache  # torch takes one mesh for another where ranks and names are the same: hence names, too
def counting(*rows):
    """The counting group of each row of ranks that this one stands in."""
    comm_bytes.register()
    made = [(row, dist.new_group(row, backend="counting")) for row in rows]
    return [group for row, group in made if dist.get_rank() in row]


def ddp(model, ranks):
    groups = counting(range(ranks))
    return DistributedDataParallel(model, process_group=groups[0]), groups


def fsdp2(model, ranks):
    groups = counting(range(ranks))
    return sharded(
        model, mesh=DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=("counted",))
    ), groups


def hsdp(model, ranks):
    """Copies (0, 2) and (1, 3), shards (0, 1) and (2, 3)."""
    groups = counting((0, 2), (1, 3), (0, 1), (2, 3))
    rows = torch.arange(4).view(2, 2)
    mesh = DeviceMesh.from_group(
        groups, "cpu", mesh=rows, mesh_dim_names=("counted_copies", "counted_shards")
    )
    return sharded(model, mesh=mesh), groups


ENGINES = {"ddp": (ddp, 3), "fsdp2": (fsdp2, 3), "hsdp": (hsdp, 4)}
