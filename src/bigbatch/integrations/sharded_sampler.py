"""One rank's share of a sampler's order: every W-th sample, none twice."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from bigbatch.data.rank_consistency import samples_of_rank


class ShardedSampler(Sampler[Any]):
    """Deals the order of a sampler, which must be the same on all ranks, to one of them.

    Rank r has the samples at r, r + W, r + 2 W ..., as `ElasticDistributedSampler` deals.

    Args:
        sampler: of the whole data set.
        rank: that it serves.
        ranks: W.
        multiple: samples beyond the last multiple of so many are left out.
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
        """What the order is drawn from, where that is not given by the epoch alone."""
        seeded = hasattr(self.sampler, "initial_seed")  # accelerate's, which seeds every epoch
        return None if seeded else getattr(self.sampler, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler, if it asks."""
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
        # One ahead, so that a generator has drawn the whole pass before a rank's last sample is
        # out: ranks whose passes end differently then go into the next from the same state.
        ahead = next(local, None)
        for following in local:
            yield ahead
            ahead = following
        if len(self):
            yield ahead
