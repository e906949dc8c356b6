"""What one rank has of DDP's buckets, and how it gets there and back."""

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
from bigbatch.statistics.second_moment import join

CHUNK_BYTES = 16 << 20  # of one: DDP's first step is one bucket of the whole model
_AHEAD = 2  # chunks in flight

M2Of = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Span:
    """A run of a parameter's elements, in the order of its memory.

    Args:
        parameter: whose.
        parameter_slice: which of its elements.
        shard_slice: where they are in the shard, or the chunk.
    """

    parameter: Tensor
    parameter_slice: slice
    shard_slice: slice


class Shard:
    """This rank's elements of one bucket: the mean gradient of the step, and p.

    Args:
        places: the parameters of the bucket and where each begins.
        buffer: the bucket's own.
        levels: of ranks that share it.
    """

    def __init__(
        self, places: list[tuple[Tensor, int]], buffer: Tensor, levels: list[Level]
    ) -> None:
        self.parameters = [parameter for parameter, _ in places]
        self.levels = levels
        self._places = places
        self._buffer = (buffer.numel(), buffer.dtype)
        ranks = 1
        for level in levels:
            ranks *= len(level.members)
        most = max(1, CHUNK_BYTES // buffer.element_size() // ranks) * ranks
        starts = range(0, buffer.numel(), most)
        self.chunks = [Chunk(s, min(s + most, buffer.numel()), levels) for s in starts]
        self.chunk_slices: list[slice] = []  # of each chunk's shard
        self.spans: list[Span] = []
        at = 0
        for chunk in self.chunks:
            length = chunk.shard.stop - chunk.shard.start
            self.chunk_slices.append(slice(at, at + length))
            self.spans += self.spans_of(chunk.shard, at)
            at += length
        self.mean = torch.zeros(at, dtype=sum_dtype(buffer.dtype), device=buffer.device)
        self._average: Tensor | None = None
        self._next: Tensor | None = None  # what p is if the step is taken
        self._steps: dict[Tensor, int] = {}  # of p

    def is_of(self, parameters: Collection[Tensor], buffer: Tensor) -> bool:
        """Whether it is of these parameters in this order."""
        same = [id(p) for p in parameters] == [id(p) for p in self.parameters]
        return same and (buffer.numel(), buffer.dtype) == self._buffer

    def spans_of(self, run: slice, at: int = 0) -> list[Span]:
        """The parameters' elements in a run of the bucket, which begins at `at` elsewhere."""
        spans = []
        for parameter, start in self._places:
            low, high = max(run.start, start), min(run.stop, start + parameter.numel())
            if low < high:
                shard_slice = slice(at + low - run.start, at + high - run.start)
                spans.append(Span(parameter, slice(low - start, high - start), shard_slice))
        return spans

    # p

    def keeps(self, parameter: Tensor) -> bool:
        """Whether p of a parameter is here and on the other ranks."""
        return parameter in self._steps

    def is_brought(self, momentum: GsnrMomentum) -> bool:
        """Whether every rank has p of the whole bucket, as it is now."""
        return all(momentum.of(p)[0] is not None for p in self._steps)

    def begin(self, groups: dict[Tensor, dict[str, Any]], momentum: GsnrMomentum) -> None:
        """Prepares the next p, if any parameter of the bucket has one."""
        self._next = None
        asked = [p for p in self.parameters if p in groups and groups[p]["beta3"] is not None]
        if not asked:
            return
        if self._average is None:
            self._average = torch.zeros_like(self.mean)
            for span in self.spans:
                whole, _ = momentum.of(span.parameter)
                if whole is not None:
                    flat = flattened(whole, span.parameter.stride())
                    self._average[span.shard_slice] = flat[span.parameter_slice]
        for parameter in asked:
            if parameter not in self._steps:
                self._steps[parameter] = momentum.of(parameter)[1]
        self._next = self._average.clone()

    def average_of(self, span: Span, group: dict[str, Any]) -> tuple[Tensor | None, float]:
        """(p, 1 / (1 - beta3^t)) of the step that may be taken."""
        beta3 = group["beta3"]
        if beta3 is None or self._next is None:
            return None, 1.0
        return self._next[span.shard_slice], 1 / (1 - beta3 ** (self._steps[span.parameter] + 1))

    def commit(self, momentum: GsnrMomentum) -> None:
        """The step was taken, for the parameters that have a gradient."""
        if self._next is None or self._average is None:
            return
        for span in self.spans:
            if span.parameter.grad is None:
                self._next[span.shard_slice] = self._average[span.shard_slice]
        self._average, self._next = self._next, None
        for parameter in self._steps:
            if parameter.grad is not None:
                self._steps[parameter] += 1
            momentum.drop(parameter)

    def bring(self, momentum: GsnrMomentum) -> None:
        """Gives every rank p of the whole bucket. Collective."""
        if self._average is None:
            return
        numel, _ = self._buffer
        flat = self.mean.new_empty(numel)
        for chunk, shard_slice in zip(self.chunks, self.chunk_slices, strict=True):
            chunk.gather(self._average[shard_slice], flat[chunk.start : chunk.stop])()
        for parameter, start in self._places:
            if parameter in self._steps:
                whole = torch.zeros_like(parameter, dtype=flat.dtype, requires_grad=False)
                flattened(whole, parameter.stride()).copy_(flat[start : start + whole.numel()])
                momentum.put(parameter, whole, self._steps[parameter])


class Bucket:
    """A bucket in flight: scattered, received and summed, gathered.

    Args:
        shard: what this rank is to have of it.
        buffer: its sums on this rank; what everybody has in the end.
        m2_of: M2 of a parameter on this rank, flat; None where no rank has any.
        m2_dtype: in which it is sent; None: bfloat16, or float64 where the sums are.
    """

    def __init__(
        self, shard: Shard, buffer: Tensor, m2_of: M2Of | None, m2_dtype: torch.dtype | None
    ) -> None:
        self.shard = shard
        self.scaled = False
        self.future = future_on(buffer.device)
        self._buffer, self._m2_of = buffer, m2_of
        own = torch.float64 if buffer.dtype is torch.float64 else torch.bfloat16
        self._m2_dtype = m2_dtype or own
        self._scattered: list[list[Callable[[], Tensor]]] = []
        self._gathering: list[Callable[[], None]] = []
        for _ in shard.chunks[:_AHEAD]:
            self._scatter()

    def receive(self, weights: Sequence[float], *, fused: bool) -> Tensor:
        """Writes S of the shard where its mean belongs, and returns M2."""
        m2 = torch.empty_like(self.shard.mean)
        for number, shard_slice in enumerate(self.shard.chunk_slices):
            rows = [received() for received in self._scattered[number]]
            self._scattered[number] = []
            if len(self._scattered) < len(self.shard.chunks):
                self._scatter()
            self._join(self.shard.chunks[number], rows, shard_slice, m2, weights, fused)
        return m2

    def send_back(self, scaled: Tensor) -> None:
        """Begins to give everybody what was made of the shard."""
        scaled = scaled.to(self._buffer.dtype)
        for chunk, shard_slice in zip(self.shard.chunks, self.shard.chunk_slices, strict=True):
            whole = self._buffer[chunk.start : chunk.stop]
            self._gathering.append(chunk.gather(scaled[shard_slice], whole))
        self.scaled = True

    def finish(self) -> None:
        """Waits for what the others send, and tells DDP."""
        for gathered in self._gathering:
            gathered()
        self.future.set_result(self._buffer)

    def _scatter(self) -> None:
        """Scatters the next chunk: S, and M2 if there is any."""
        chunk = self.shard.chunks[len(self._scattered)]
        scattered = [chunk.scatter(self._buffer[chunk.start : chunk.stop], 0)]
        if self._m2_of is not None:
            scattered.append(chunk.scatter(self._m2(chunk, self._m2_of), 0))
        self._scattered.append(scattered)

    def _m2(self, chunk: Chunk, m2_of: M2Of) -> Tensor:
        length = chunk.stop - chunk.start
        sent = torch.zeros(length, dtype=self._m2_dtype, device=self._buffer.device)
        for span in self.shard.spans_of(slice(chunk.start, chunk.stop)):
            m2 = m2_of(span.parameter)
            if m2 is not None:
                sent[span.shard_slice] = m2[span.parameter_slice]
        return sent

    def _join(
        self,
        chunk: Chunk,
        rows: list[Tensor],
        shard_slice: slice,
        m2: Tensor,
        weights: Sequence[float],
        fused: bool,
    ) -> None:
        """Level by level; M2 of the first may be missing."""
        for number, level in enumerate(self.shard.levels):
            last = number == len(self.shard.levels) - 1
            total = (
                self.shard.mean[shard_slice]
                if last
                else self.shard.mean.new_empty(rows[0].shape[1])
            )
            second = m2[shard_slice] if last else torch.empty_like(total)
            of_members = [sum(weights[rank] for rank in ranks) for ranks in level.members]
            join(rows[0], rows[1] if len(rows) > 1 else (), of_members, total, second, fused=fused)
            if not last:
                between = (total, second.to(self._m2_dtype))
                rows = [received() for received in [chunk.scatter(x, number + 1) for x in between]]


def future_on(device: torch.device) -> Future[Tensor]:
    """For DDP, which waits for it; on a GPU with what was launched there before its result."""
    return Future() if device.type == "cpu" else Future(devices=[device])
