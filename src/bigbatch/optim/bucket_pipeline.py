"""Reduces DDP's buckets in one step: from every rank's sums to r g on all ranks.

A bucket is scattered when it is ready, scaled and sent back when the next one is ready, and
received after that: two are in flight while the backward continues.
See [Note: GSNR inside DDP's all-reduce] in `ddp_comm_hook.py`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from bigbatch.errors import GradientError
from bigbatch.gradients import changed_later
from bigbatch.gradients.dtypes import widest_float
from bigbatch.optim.apply_gsnr import Layers, apply_gsnr, shares_out_of_range
from bigbatch.optim.bucket_shards import Chunk, Shard
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.statistics.norms import flattened, squared_norm
from bigbatch.statistics.second_moment import combine_moments

_PREFETCHED = 2  # chunks in flight

M2Of = Callable[[Tensor], Tensor | None]


class Bucket:
    """A bucket in flight: scattered, received and summed, gathered.

    Args:
        shard: this rank's shard of the bucket.
        buffer: the sums of this rank; in the end, the scaled gradient of all ranks.
        m2_of: returns M2 of a parameter on this rank, flat; None if no rank has any.
    """

    def __init__(self, shard: Shard, buffer: Tensor, m2_of: M2Of | None) -> None:
        self.shard = shard
        self.scaled = False
        self.future = future_on(buffer.device)
        self._buffer, self._m2_of = buffer, m2_of
        self._unsent = iter(shard.chunks)
        self._scattered: deque[list[Callable[[], Tensor]]] = deque()
        self._gathering: list[Callable[[], None]] = []
        for _ in range(_PREFETCHED):
            self._scatter_next()

    def receive(self, weights: Sequence[float], *, fused: bool) -> Tensor:
        """Writes S of the shard to `shard.mean`, and returns its M2."""
        m2 = torch.empty_like(self.shard.mean)
        for chunk in self.shard.chunks:
            sums, *rank_m2s = [wait() for wait in self._scattered.popleft()]
            self._scatter_next()
            total, total_m2 = self.shard.mean[chunk.among_shards], m2[chunk.among_shards]
            rows = rank_m2s[0] if rank_m2s else ()
            combine_moments(sums, rows, weights, total, total_m2, fused=fused)
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
        scattered = [chunk.scatter(self._buffer[chunk.whole])]
        if self._m2_of is not None:
            scattered.append(chunk.scatter(self._m2(chunk, self._m2_of)))
        self._scattered.append(scattered)

    def _m2(self, chunk: Chunk, m2_of: M2Of) -> Tensor:
        sums = self._buffer[chunk.whole]
        # bfloat16 has the range of the squares; its rounding changes r g by about 5e-4
        dtype = torch.float64 if sums.dtype is torch.float64 else torch.bfloat16
        chunk_m2 = torch.zeros_like(sums, dtype=dtype)
        for span in self.shard.spans_of(chunk.whole):
            m2 = m2_of(span.parameter)
            if m2 is not None:
                chunk_m2[span.shard_slice] = m2[span.parameter_slice]
        return chunk_m2


@dataclass(eq=False)
class BucketPipeline:
    """The reduction of one step.

    Attributes:
        done: whether every bucket is reduced.
        layers: the row of `apply_gsnr` of each parameter, over all ranks, if r is watched.
        squares: |g|^2 of each parameter of the model, when done.
        checked, out_of_range: the parameters on this rank whose M2 was checked, one for each span,
            and the shares of these that are out of range.
        live: elements whose groups do not agree to rounding.
    """

    state: GsnrState  # the optimizer's moments, momentum and options
    group: dist.ProcessGroup  # the process group
    weights: list[float]  # weight of the micro-batches of each rank
    k: int  # number of groups that are compared
    sends_m2: bool  # whether any rank has an M2 of its own

    def __post_init__(self) -> None:
        self.done = False
        self.layers: dict[Tensor, Tensor] = {}
        self.squares: dict[Tensor, Tensor] = {}
        self.checked: list[Tensor] = []
        self.out_of_range: list[Tensor] = []
        self.live = torch.zeros(())
        vr_groups = [group for group in self.state.base.param_groups if group["vr"]]
        self._groups = {p: group for group in vr_groups for p in group["params"]}
        self._in_flight: list[Bucket] = []

    def take(self, shard: Shard, buffer: Tensor) -> Future[Tensor]:
        """Scatters a bucket, and moves the buckets before it to their next stage."""
        m2 = self._m2_of if self.sends_m2 else None
        self._in_flight.append(Bucket(shard, buffer, m2))
        future = self._in_flight[-1].future
        self._advance(unscaled=1, in_flight=2)
        return future

    def end(self, parameters: list[Tensor]) -> None:
        """Finishes every bucket, and sums |g|^2 of every parameter over the ranks."""
        self._advance(unscaled=0, in_flight=0)
        device = parameters[0].device
        zero = torch.zeros((), dtype=widest_float(device), device=device)
        squares = torch.stack([self.squares.get(p, zero).to(zero) for p in parameters])
        dist.all_reduce(squares, group=self.group)
        self.squares = dict(zip(parameters, squares, strict=True))
        self.done = True

    def require_all_reduced(self) -> None:
        """Raises GradientError if a gradient was not reduced, or was changed after it was read."""
        for group in self.state.base.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.squares:
                    raise GradientError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient that DDP "
                        "did not reduce (unfrozen, or given to the optimizer, after the model was "
                        "wrapped?); wrap the model again, and attach the optimizer to that"
                    )
                if self.sends_m2 and parameter in self._groups and changed_later(parameter):
                    raise GradientError(
                        "a hook that was registered on a parameter after attach() changes its "
                        "gradient after it was seen; register it before"
                    )

    def _advance(self, unscaled: int, in_flight: int) -> None:
        """Scales all buckets but the last `unscaled`, and finishes all but the last `in_flight`."""
        for bucket in self._in_flight[: len(self._in_flight) - unscaled]:
            if not bucket.scaled:
                self._scale(bucket)
        while len(self._in_flight) > in_flight:
            self._in_flight.pop(0).finish()

    def _m2_of(self, parameter: Tensor) -> Tensor | None:
        """M2 of this rank's micro-batches, flat as in the bucket; None if the group has no vr."""
        if parameter not in self._groups:
            return None
        _, m2s = self.state.moments.sums_and_m2s([parameter], self.state.sums_of)
        return flattened(m2s[0], parameter.stride())

    def _scale(self, bucket: Bucket) -> None:
        """Computes r g on this rank's shard, and begins to gather it."""
        shard, ranks = bucket.shard, len(self.weights)
        m2 = bucket.receive(self.weights, fused=self.state.uses_kernels)
        shard.mean.div_(ranks)
        scaled = shard.mean.clone()
        shard.begin(self._groups, self.state.momentum)
        for group in self.state.base.param_groups:
            self._scale_group(group, shard, m2, scaled)
        for span in shard.spans:
            square = squared_norm(shard.mean[span.shard_slice])
            self.squares[span.parameter] = square + self.squares.get(span.parameter, 0)
        bucket.send_back(scaled)

    def _scale_group(self, group: dict[str, Any], shard: Shard, m2: Tensor, scaled: Tensor) -> None:
        """Scales the parameters of a bucket that are in one parameter group."""
        parameters = [p for p in shard.parameters if self._groups.get(p) is group]
        if not parameters:
            return
        numbers = {p: number for number, p in enumerate(parameters)}
        spans = [span for span in shard.spans if span.parameter in numbers]
        totals = [shard.mean[s.shard_slice] for s in spans]
        m2s = [m2[s.shard_slice] for s in spans]
        gradients = [scaled[s.shard_slice] for s in spans]
        beta3 = group["beta3"]
        momentum = () if beta3 is None else shard.averages_of(spans, beta3)
        layers = Layers(totals, m2s, gradients, *momentum)
        layer_numbers = [numbers[span.parameter] for span in spans]
        of_spans = torch.tensor(layer_numbers, dtype=torch.int64, device=scaled.device)
        reduced: list[Tensor] = []  # the sums of the bucket's layers, (layers, columns), by call

        def all_reduce(values: Tensor) -> None:
            sums = values.new_zeros(len(parameters), values.shape[1], device=scaled.device)
            sums.index_add_(0, of_spans, values.to(scaled.device))
            dist.all_reduce(sums, group=self.group)
            values.copy_(sums[of_spans])
            reduced.append(sums)

        weight = sum(self.weights) / len(self.weights) ** 2  # the means are S / ranks
        if self.state.warnings.checks_range:
            self.checked += [span.parameter for span in spans]
            self.out_of_range.append(shares_out_of_range(totals, m2s, weight))
        fused, watch = self.state.uses_kernels, self.state.watch
        rows = apply_gsnr(layers, group, weight, all_reduce, fused=fused, watch=watch)
        self.live = self.live + reduced[0][:, 1].sum()
        if watch:
            all_reduce(rows)
            self.layers.update(zip(parameters, reduced[1], strict=True))


def future_on(device: torch.device) -> Future[Tensor]:
    """A future for DDP; on a GPU it also waits for the work launched before its result."""
    return Future() if device.type == "cpu" else Future(devices=[device])
