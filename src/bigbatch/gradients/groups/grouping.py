"""How the samples of a backward are cut into groups, and which part of a tensor each group has."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """Consecutive samples in groups whose sizes differ by at most one, larger groups first."""

    samples: int  # B, samples of the backward
    groups: int  # k, at most B

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each group."""
        size, larger = divmod(self.samples, self.groups)
        return (size + 1,) * larger + (size,) * (self.groups - larger)

    def sums(self, weights: Sequence[float] | Tensor) -> list[float]:
        """The sum of the samples' weights in each group."""
        numbers = iter(weights.tolist() if isinstance(weights, Tensor) else weights)
        return [math.fsum(itertools.islice(numbers, size)) for size in self.sizes]

    def split(self, tensor: Tensor, dim: int = 0) -> list[Tensor]:
        """Cuts `dim` into (groups, entries of each): one tensor, or two of equal groups each."""
        sizes, shape = self.sizes, tensor.shape
        if sizes[0] == sizes[-1]:
            size = shape[dim] // self.groups
            return [tensor.reshape(*shape[:dim], self.groups, size, *shape[dim + 1 :])]
        larger = sizes.count(sizes[0])
        first = Grouping(larger * sizes[0], larger)
        parts = first, Grouping(self.samples - first.samples, self.groups - larger)
        rows = [shape[dim] // self.samples * part.samples for part in parts]
        cut = zip(parts, torch.split(tensor, rows, dim), strict=True)
        return [part.split(some, dim)[0] for part, some in cut]

    def members(self, device: torch.device) -> Tensor:
        """Whether each sample is of each group, (k, B)."""
        groups = torch.eye(self.groups, dtype=torch.bool, device="cpu")
        return groups.repeat_interleave(torch.tensor(self.sizes, device="cpu"), 1).to(device)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts of `Grouping.split`, or other tensors, in one; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
