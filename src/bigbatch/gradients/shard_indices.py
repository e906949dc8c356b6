"""Which elements of a gradient a rank's shard of it holds."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ShardIndices = tuple[Tensor, Tensor]
"""Where they are in the flattened shard, and their numbers among those asked for; on the CPU."""


def indices_in_runs(places: Tensor, runs: Iterable[tuple[int, int]]) -> ShardIndices:
    """For a shard that is runs of the flat gradient, one after another.

    Args:
        places: of the elements asked for, in the flat gradient.
        runs: first element and length of each.
    """
    positions, numbers = [places[:0]], [places[:0]]
    at = 0
    for first, length in runs:
        inside = ((places >= first) & (places < first + length)).nonzero().squeeze(1)
        positions.append(places[inside] - first + at)
        numbers.append(inside)
        at += length
    return torch.cat(positions), torch.cat(numbers)


def indices_in_rows(
    count: int, shape: Sequence[int], dim: int, first: int, length: int
) -> ShardIndices:
    """For a shard that is `length` neighbours of one dimension, of the first `count` elements."""
    inner = math.prod(shape[dim + 1 :])
    numbers = torch.arange(count, device="cpu")
    row = numbers // inner % shape[dim]
    inside = ((row >= first) & (row < first + length)).nonzero().squeeze(1)
    outer = inside // (inner * shape[dim])
    return (outer * length + row[inside] - first) * inner + inside % inner, inside


def places_in_memory(count: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Where the first `count` elements are in a dense tensor with its dimensions in this order."""
    numbers = torch.arange(count, device="cpu")
    places, step = torch.zeros_like(numbers), 1
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim])[::-1]:
        places += numbers // math.prod(shape[dim + 1 :]) % shape[dim] * step
        step *= shape[dim]
    return places
