"""One rank's share of a sampler's order: every W-th sample, none of them twice."""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import torch
from torch.utils.data import Sampler

from bigbatch.data.rank_consistency import samples_of_rank


class ShardedSampler(Sampler[Any]):
    """Selects the samples of one rank from a sampler whose order is the same on all ranks.

    Rank r has the samples at r, r + W, r + 2 W ..., as in `ElasticDistributedSampler`.

    Args:
        sampler: the sampler of the whole data set.
        rank: the rank r that iterates over the samples.
        ranks: number of ranks W.
        multiple: samples beyond the last multiple of this number are left out.
    Example:
        >>> [list(ShardedSampler(range(10, 15), rank=rank, ranks=2)) for rank in (0, 1)]
        [[10, 12, 14], [11, 13]]
    """

    def __init__(self, sampler: Any, rank: int, ranks: int, multiple: int = 1) -> None:
        self.sampler = sampler
        self.rank, self.ranks = rank, ranks
        self.total = len(sampler) - len(sampler) % multiple  # over all ranks

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the order; None where the epoch alone determines the order."""
        seeds_epochs = hasattr(self.sampler, "initial_seed")  # accelerate's SeedableRandomSampler
        return None if seeds_epochs else getattr(self.sampler, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the sampler, if it has one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return samples_of_rank(self.total, self.rank, self.ranks)

    def __iter__(self) -> Iterator[Any]:
        local = (
            sample
            for position, sample in enumerate(self.sampler)
            if position < self.total and position % self.ranks == self.rank
        )
        # Reads one sample ahead, so that a generator has drawn the whole pass before a rank yields
        # its last sample: ranks with unequal passes then start the next from the same state.
        for sample, _ in pairwise(chain(local, [None])):
            yield sample
