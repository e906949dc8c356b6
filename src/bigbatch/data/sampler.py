"""One order of the samples for any number of ranks, by (seed, epoch)."""

from collections.abc import Iterator, Sized

import numpy
import torch.distributed as dist
from torch.utils.data import Sampler

from bigbatch.errors import SettingError
from bigbatch.setting_types import Count, Whole, checked

_AT_ONCE = 65_536


class ElasticDistributedSampler(Sampler[int]):
    """A sampler whose order does not depend on who reads it.

    The samples of an epoch have one order, by (seed, epoch). Rank r of W reads positions r, r + W,
    r + 2 W, ... of it, so that W ranks together take the next interval of the order in every step.
    Like DistributedSampler, but nothing is padded or dropped: ranks may differ by one sample; and a
    pass can begin at any position, for any number of ranks, without reading what came before.

    Args:
        data: the data set, or anything with its length.
        shuffle: whether the order is random.
        seed: of the order, the same on every rank.
        num_replicas, rank: how many ranks world are, and which one reads; default: those of
            torch.distributed, or one.
    Raises:
        SettingError: no samples, fewer samples than ranks, or a rank that does not exist.
    Example:
        >>> list(ElasticDistributedSampler(range(5), shuffle=False, num_replicas=2, rank=1))
        [1, 3]
        >>> sorted(ElasticDistributedSampler(range(5), seed=1))
        [0, 1, 2, 3, 4]
    """

    @checked
    def __init__(
        self,
        data: Sized,
        *,
        shuffle: bool = True,
        seed: Whole = 0,
        num_replicas: Count | None = None,
        rank: Whole | None = None,
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        own_rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self.num_replicas = world if num_replicas is None else num_replicas
        self.rank = own_rank if rank is None else rank
        self.samples = len(data)
        if not 0 <= self.rank < self.num_replicas:
            raise SettingError(f"rank={self.rank} is none of num_replicas={self.num_replicas}")
        if self.samples < self.num_replicas:
            raise SettingError(f"{self.samples} samples are too few for {self.num_replicas} ranks")
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0
        self._start = 0

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return len(range(self.rank, self.samples, self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Which order the next pass has; that of another epoch begins at position 0."""
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0

    def start_at(self, position: int) -> None:
        """The next pass begins at this position of the order over all ranks."""
        self._start = position

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        order = numpy.arange(self.samples, dtype=numpy.min_scalar_type(self.samples))
        if self.shuffle:
            numpy.random.default_rng([self.seed, self._epoch]).shuffle(order)
        first = start + (self.rank - start) % self.num_replicas
        own = order[first :: self.num_replicas]
        for begin in range(0, len(own), _AT_ONCE):  # as a list, an index takes 40 bytes
            yield from own[begin : begin + _AT_ONCE].tolist()
