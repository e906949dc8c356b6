"""A rank's shards of DDP's buckets, scattered over the ranks and gathered again.

See [Note: GSNR inside DDP's all-reduce] in `ddp_comm_hook.py`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.optim.gsnr_state import GsnrMomentum
from bigbatch.statistics.norms import flattened

CHUNK_BYTES = 16 << 20  # of a chunk

_c10d: Any = dist  # torch 2.13 renamed the function, and its stubs have one name only
all_gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor


class Chunk:
    """A slice of a bucket, of which every rank has a shard; this rank's begins at `offset`."""

    def __init__(self, whole: slice, group: dist.ProcessGroup, offset: int) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        length = whole.stop - whole.start
        size = -(-length // ranks)
        self._group = group
        self._sizes = [max(0, min(size, length - i * size)) for i in range(ranks)]
        self._size = self._sizes[rank]  # elements of this rank
        start = whole.start + sum(self._sizes[:rank])
        self.whole = whole  # in the bucket
        self.shard = slice(start, start + self._size)  # in the bucket
        self.among_shards = slice(offset, offset + self._size)

    def scatter(self, values: Tensor) -> Callable[[], Tensor]:
        """Begins to send each rank its part of this rank's flat values.

        Returns a function that waits for all ranks' values of this rank's part, (ranks, elements).
        """
        ranks = len(self._sizes)
        rows = values.new_empty(ranks * self._size)
        work = dist.all_to_all_single(
            rows, values, [self._size] * ranks, self._sizes, self._group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return rows.view(ranks, self._size)

        return wait

    def gather(self, shard: Tensor, out: Tensor) -> Callable[[], None]:
        """Begins to write all ranks' shards to `out`; returns a function that waits for them."""
        size = self._sizes[0]  # the largest
        is_even = size * len(self._sizes) == out.numel()
        padded = out if is_even else out.new_empty(size * len(self._sizes))
        if len(shard) < size:
            shard = torch.cat([shard, shard.new_zeros(size - len(shard))])
        work = all_gather(padded, shard, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()
            if not is_even:
                out.copy_(padded[: out.numel()])

        return wait


@dataclass(frozen=True)
class Span:
    """Consecutive elements of a parameter, in the order of its memory."""

    parameter: Tensor
    parameter_slice: slice  # its elements
    shard_slice: slice  # the same elements in the shard, or in the chunk


class Shard:
    """This rank's elements of one bucket: the mean gradient of the step, and p."""

    def __init__(
        self, offsets: list[tuple[Tensor, int]], buffer: Tensor, group: dist.ProcessGroup
    ) -> None:
        self.parameters = [parameter for parameter, _ in offsets]
        self._offsets = offsets
        self._buffer = (buffer.numel(), buffer.dtype)
        ranks = dist.get_world_size(group)
        size = max(1, CHUNK_BYTES // buffer.element_size() // ranks) * ranks
        self.chunks: list[Chunk] = []
        self.spans: list[Span] = []
        offset = 0
        for start in range(0, buffer.numel(), size):
            chunk = Chunk(slice(start, min(start + size, buffer.numel())), group, offset)
            self.chunks.append(chunk)
            self.spans += self.spans_of(chunk.shard, offset)
            offset = chunk.among_shards.stop
        self.mean = torch.zeros(offset, dtype=sum_dtype(buffer.dtype), device=buffer.device)
        self._average: Tensor | None = None  # p
        self._next_average: Tensor | None = None  # p after the step, if it is taken
        self.steps: dict[Tensor, int] = {}  # of p, for the parameters whose p is scattered

    def is_of(self, parameters: Collection[Tensor], buffer: Tensor) -> bool:
        """Whether the bucket has these parameters in this order, and this buffer."""
        same = [id(p) for p in parameters] == [id(p) for p in self.parameters]
        return same and (buffer.numel(), buffer.dtype) == self._buffer

    def spans_of(self, run: slice, offset: int = 0) -> list[Span]:
        """The parameters' elements in a slice of the bucket, which begins at `offset` elsewhere."""
        spans = []
        for parameter, start in self._offsets:
            low, high = max(run.start, start), min(run.stop, start + parameter.numel())
            if low < high:
                shard_slice = slice(offset + low - run.start, offset + high - run.start)
                spans.append(Span(parameter, slice(low - start, high - start), shard_slice))
        return spans

    # p

    def begin(self, groups: dict[Tensor, dict[str, Any]], momentum: GsnrMomentum) -> None:
        """Prepares the next p, if any parameter of the bucket has beta3."""
        self._next_average = None
        averaged = [p for p in self.parameters if p in groups and groups[p]["beta3"] is not None]
        if not averaged:
            return
        if self._average is None:
            self._average = torch.zeros_like(self.mean)
            for span in self.spans:
                if span.parameter in momentum:
                    flat = flattened(momentum[span.parameter][0], span.parameter.stride())
                    self._average[span.shard_slice] = flat[span.parameter_slice]
        for parameter in averaged:
            _, steps = momentum.get(parameter, (None, 0))
            self.steps.setdefault(parameter, steps)
        self._next_average = self._average.clone()

    def averages_of(self, spans: list[Span], beta3: float) -> tuple[list[Tensor], list[float]]:
        """p and 1 / (1 - beta3^t) of the next step, of the elements in each span."""
        assert self._next_average is not None
        averages = [self._next_average[span.shard_slice] for span in spans]
        return averages, [1 / (1 - beta3 ** (self.steps[s.parameter] + 1)) for s in spans]

    def commit(self, momentum: GsnrMomentum) -> None:
        """Makes the next p the present one, for the parameters that have a gradient."""
        if self._next_average is None or self._average is None:
            return
        for span in self.spans:
            if span.parameter.grad is None:
                self._next_average[span.shard_slice] = self._average[span.shard_slice]
        self._average, self._next_average = self._next_average, None
        for parameter in self.steps:
            if parameter.grad is not None:
                self.steps[parameter] += 1
            momentum.pop(parameter, None)

    def gather(self, momentum: GsnrMomentum) -> None:
        """Gives every rank p of the whole bucket. Collective."""
        if self._average is None:
            return
        numel, _ = self._buffer
        flat = self.mean.new_empty(numel)
        for chunk in self.chunks:
            chunk.gather(self._average[chunk.among_shards], flat[chunk.whole])()
        for parameter, start in self._offsets:
            if parameter in self.steps:
                average = torch.zeros_like(parameter, dtype=flat.dtype, requires_grad=False)
                values = flat[start : start + average.numel()]
                flattened(average, parameter.stride()).copy_(values)
                momentum[parameter] = average, self.steps[parameter]
