"""A rank's shards of DDP's buckets, and buckets on their way to the shards and back.

See [Note: GSNR inside DDP's all-reduce] in `ddp_comm_hook.py`.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.optim.collectives import Chunk, Level
from bigbatch.optim.gsnr_momentum import GsnrMomentum
from bigbatch.statistics.norms import flattened
from bigbatch.statistics.second_moment import combine_moments

CHUNK_BYTES = 16 << 20  # of a chunk
_PREFETCHED = 2  # chunks in flight

M2Of = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Span:
    """Consecutive elements of a parameter, in the order of its memory."""

    parameter: Tensor  # the parameter
    parameter_slice: slice  # its elements
    shard_slice: slice  # the same elements in the shard, or in the chunk


class Shard:
    """This rank's elements of one bucket: the mean gradient of the step, and p."""

    def __init__(
        self, offsets: list[tuple[Tensor, int]], buffer: Tensor, levels: list[Level]
    ) -> None:
        self.parameters = [parameter for parameter, _ in offsets]
        self.levels = levels
        self._offsets = offsets
        self._buffer = (buffer.numel(), buffer.dtype)
        ranks = math.prod(len(level.members) for level in levels)
        size = max(1, CHUNK_BYTES // buffer.element_size() // ranks) * ranks
        self.chunks: list[Chunk] = []
        self.spans: list[Span] = []
        offset = 0
        for start in range(0, buffer.numel(), size):
            chunk = Chunk(slice(start, min(start + size, buffer.numel())), levels, offset)
            self.chunks.append(chunk)
            self.spans += self.spans_of(chunk.shard, offset)
            offset = chunk.among_shards.stop
        self.mean = torch.zeros(offset, dtype=sum_dtype(buffer.dtype), device=buffer.device)
        self._average: Tensor | None = None  # p
        self._next_average: Tensor | None = None  # p after the step, if it is taken
        self._steps: dict[Tensor, int] = {}  # steps of p

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

    def has_p_of(self, parameter: Tensor) -> bool:
        """Whether p of a parameter is scattered over the ranks."""
        return parameter in self._steps

    def is_gathered(self, momentum: GsnrMomentum) -> bool:
        """Whether every rank has the present p of the whole bucket."""
        return self._steps.keys() <= momentum.keys()

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
            self._steps.setdefault(parameter, steps)
        self._next_average = self._average.clone()

    def average_of(self, span: Span, group: dict[str, Any]) -> tuple[Tensor | None, float]:
        """(p, 1 / (1 - beta3^t)) of the next step, of the elements in a span."""
        beta3 = group["beta3"]
        if beta3 is None or self._next_average is None:
            return None, 1.0
        t = self._steps[span.parameter] + 1
        return self._next_average[span.shard_slice], 1 / (1 - beta3**t)

    def commit(self, momentum: GsnrMomentum) -> None:
        """Makes the next p the present one, for the parameters that have a gradient."""
        if self._next_average is None or self._average is None:
            return
        for span in self.spans:
            if span.parameter.grad is None:
                self._next_average[span.shard_slice] = self._average[span.shard_slice]
        self._average, self._next_average = self._next_average, None
        for parameter in self._steps:
            if parameter.grad is not None:
                self._steps[parameter] += 1
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
            if parameter in self._steps:
                average = torch.zeros_like(parameter, dtype=flat.dtype, requires_grad=False)
                values = flat[start : start + average.numel()]
                flattened(average, parameter.stride()).copy_(values)
                momentum[parameter] = average, self._steps[parameter]


class Bucket:
    """A bucket in flight: scattered, received and summed, gathered.

    Args:
        shard: this rank's shard of the bucket.
        buffer: the sums of this rank; in the end, the scaled gradient of all ranks.
        m2_of: returns M2 of a parameter on this rank, flat; None if no rank has any.
        m2_dtype: the type in which M2 is sent; None: float64 for float64 sums, else bfloat16.
    """

    def __init__(
        self, shard: Shard, buffer: Tensor, m2_of: M2Of | None, m2_dtype: torch.dtype | None
    ) -> None:
        self.shard = shard
        self.scaled = False
        self.future = future_on(buffer.device)
        self._buffer, self._m2_of = buffer, m2_of
        default = torch.float64 if buffer.dtype is torch.float64 else torch.bfloat16
        self._m2_dtype = m2_dtype or default
        self._unsent = iter(shard.chunks)
        self._scattered: deque[list[Callable[[], Tensor]]] = deque()
        self._gathering: list[Callable[[], None]] = []
        for _ in range(_PREFETCHED):
            self._scatter_next()

    def receive(self, weights: Sequence[float], *, fused: bool) -> Tensor:
        """Writes S of the shard to `shard.mean`, and returns its M2."""
        m2 = torch.empty_like(self.shard.mean)
        for chunk in self.shard.chunks:
            rows = [wait() for wait in self._scattered.popleft()]
            self._scatter_next()
            self._join(chunk, rows, m2, weights, fused)
        return m2

    def send_back(self, scaled: Tensor) -> None:
        """Begins to gather the scaled gradients of all shards in the buffer."""
        scaled = scaled.to(self._buffer.dtype)
        self._gathering = [
            chunk.gather(scaled[chunk.among_shards], self._buffer[chunk.whole])
            for chunk in self.shard.chunks
        ]
        self.scaled = True

    def finish(self) -> None:
        """Waits for the other ranks' shards, and completes DDP's future."""
        for wait in self._gathering:
            wait()
        self.future.set_result(self._buffer)

    def _scatter_next(self) -> None:
        """Scatters S of the next chunk if there is one, and M2 if there is any."""
        chunk = next(self._unsent, None)
        if chunk is None:
            return
        scattered = [chunk.scatter(self._buffer[chunk.whole], 0)]
        if self._m2_of is not None:
            scattered.append(chunk.scatter(self._m2(chunk, self._m2_of), 0))
        self._scattered.append(scattered)

    def _m2(self, chunk: Chunk, m2_of: M2Of) -> Tensor:
        chunk_m2 = torch.zeros_like(self._buffer[chunk.whole], dtype=self._m2_dtype)
        for span in self.shard.spans_of(chunk.whole):
            m2 = m2_of(span.parameter)
            if m2 is not None:
                chunk_m2[span.shard_slice] = m2[span.parameter_slice]
        return chunk_m2

    def _join(
        self, chunk: Chunk, rows: list[Tensor], m2: Tensor, weights: Sequence[float], fused: bool
    ) -> None:
        """Joins the moments level by level; the rows of the first may have no M2."""
        for number, level in enumerate(self.shard.levels):
            is_last = number == len(self.shard.levels) - 1
            total, second = self.shard.mean[chunk.among_shards], m2[chunk.among_shards]
            if not is_last:
                total = self.shard.mean.new_empty(rows[0].shape[1])
                second = torch.empty_like(total)
            member_weights = [sum(weights[rank] for rank in ranks) for ranks in level.members]
            member_m2 = rows[1] if len(rows) > 1 else ()
            combine_moments(rows[0], member_m2, member_weights, total, second, fused=fused)
            if not is_last:
                between = (total, second.to(self._m2_dtype))
                rows = [wait() for wait in [chunk.scatter(x, number + 1) for x in between]]


def future_on(device: torch.device) -> Future[Tensor]:
    """A future for DDP; on a GPU it also waits for the work launched before its result."""
    return Future() if device.type == "cpu" else Future(devices=[device])
