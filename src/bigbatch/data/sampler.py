"""One order of the samples for any number of ranks, by (seed, epoch)."""

from collections.abc import Iterator, Sized

import numpy
import torch.distributed as dist
from torch.utils.data import Sampler

from bigbatch.errors import SettingError
from bigbatch.setting_types import Count, Whole, checked

_CHUNK = 65_536


class ElasticDistributedSampler(Sampler[int]):
    """A sampler with one order of the samples for any number of ranks.

    The samples of an epoch have one order, by (seed, epoch). Rank r of W reads positions r, r + W,
    r + 2 W, ... of it, so that W ranks together take the next interval of the order in every step.
    Unlike DistributedSampler it neither pads nor drops: ranks may differ by one sample. And a pass
    can begin at any position, for any number of ranks, without reading the samples before it.

    Args:
        data: the data set, or an object of its length.
        shuffle: whether the order is random.
        seed: seed of the order, the same on every rank.
        num_replicas: number of ranks; default: that of torch.distributed, or 1.
        rank: the rank that reads; default: that of torch.distributed, or 0.
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
        distributed = dist.is_available() and dist.is_initialized()
        this_rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.num_replicas = world_size if num_replicas is None else num_replicas
        self.rank = this_rank if rank is None else rank
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
        """Sets the order of the next pass; that of another epoch begins at position 0."""
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0

    def start_at(self, position: int) -> None:
        """Sets the position in the order over all ranks at which the next pass begins."""
        self._start = position

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        order = numpy.arange(self.samples, dtype=numpy.min_scalar_type(self.samples))
        if self.shuffle:
            numpy.random.default_rng([self.seed, self._epoch]).shuffle(order)
        offset = start + (self.rank - start) % self.num_replicas
        indices = order[offset :: self.num_replicas]
        for begin in range(0, len(indices), _CHUNK):  # as a list, an index takes 40 bytes
            yield from indices[begin : begin + _CHUNK].tolist()
