"""Indices of the elements of a gradient that a rank's shard of it has.

A shard is a slice of one dimension under fully_shard ([Note: FSDP2's shards] in `fsdp2.py`), and
runs of the flat gradient in DDP's buckets and in ZeRO's partitions.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ShardIndices = tuple[Tensor, Tensor]
"""Positions in the flattened shard, and indices among the requested elements; on the CPU."""


def indices_in_runs(places: Tensor, runs: Iterable[tuple[int, int]]) -> ShardIndices:
    """Indices for a shard that is a concatenation of runs of the flat gradient."""
    positions, numbers = [places[:0]], [places[:0]]
    offset = 0  # of the run in the shard
    for first, length in runs:
        inside = ((places >= first) & (places < first + length)).nonzero().squeeze(1)
        positions.append(places[inside] - first + offset)
        numbers.append(inside)
        offset += length
    return torch.cat(positions), torch.cat(numbers)


def indices_in_rows(
    count: int, shape: Sequence[int], dim: int, first: int, length: int
) -> ShardIndices:
    """Indices of the first `count` elements, for a shard that is a slice of one dimension."""
    inner = math.prod(shape[dim + 1 :])
    numbers = torch.arange(count, device="cpu")
    row = numbers // inner % shape[dim]
    inside = ((row >= first) & (row < first + length)).nonzero().squeeze(1)
    outer = inside // (inner * shape[dim])
    return (outer * length + row[inside] - first) * inner + inside % inner, inside


def places_in_memory(count: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Positions of the first `count` elements in the memory of a dense tensor."""
    numbers = torch.arange(count, device="cpu")
    places, step = torch.zeros_like(numbers), 1
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim])[::-1]:
        places += numbers // math.prod(shape[dim + 1 :]) % shape[dim] * step
        step *= shape[dim]
    return places
