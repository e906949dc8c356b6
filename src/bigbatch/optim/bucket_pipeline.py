"""Reduces DDP's buckets in one step: from every rank's sums to r g on all ranks.

A bucket is scattered when it is ready, scaled and sent back when the next one is ready, and
received after that: two are in flight while the backward continues.
See [Note: GSNR inside DDP's all-reduce] in `ddp_comm_hook.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
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


@dataclass(eq=False)
class BucketPipeline:
    """The reduction of one step."""

    state: GsnrState
    group: dist.ProcessGroup
    weights: list[float]  # weight of the micro-batches of each rank
    k: int  # number of micro-batches that are compared
    sends_m2: bool  # whether any rank has an M2 of its own

    def __post_init__(self) -> None:
        self.done = False  # whether every bucket is reduced
        self.layers: dict[Tensor, Tensor] = {}  # rows of `apply_gsnr` over all ranks, if watched
        self.squares: dict[Tensor, Tensor] = {}  # |g|^2 of each parameter of the model, when done
        self.checked: list[Tensor] = []  # parameters here whose M2 was checked, one for each span
        self.out_of_range: list[Tensor] = []  # the shares of these that are out of range
        self.live = torch.zeros(())  # elements whose groups do not agree to rounding
        vr_groups = [group for group in self.state.base.param_groups if group["vr"]]
        self._groups = {p: group for group in vr_groups for p in group["params"]}
        self._in_flight: deque[Iterator[None]] = deque(maxlen=2)

    def take(self, shard: Shard, buffer: Tensor) -> Future[Tensor]:
        """Scatters a bucket, and moves the buckets before it to their next stage."""
        future = future_on(buffer.device)
        stages = self._reduce(shard, buffer, future)
        next(stages)
        self._advance()
        self._in_flight.append(stages)
        return future

    def end(self, parameters: list[Tensor]) -> None:
        """Finishes every bucket, and sums |g|^2 of every parameter over the ranks."""
        self._advance()
        self._advance()
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

    def _advance(self) -> None:
        """Moves each bucket to its next stage; the last one first, since it sends."""
        for stages in reversed(self._in_flight):
            next(stages, None)

    def _reduce(self, shard: Shard, buffer: Tensor, future: Future[Tensor]) -> Iterator[None]:
        """The stages of a bucket: scattered; summed, scaled and sent back; received.

        The buffer has the sums of this rank; in the end, the scaled gradient of all ranks.
        """
        unsent = (self._scatter(shard, chunk, buffer[chunk.whole]) for chunk in shard.chunks)
        scattered = deque(islice(unsent, _PREFETCHED))
        yield
        m2, fused = torch.empty_like(shard.mean), self.state.uses_kernels
        for chunk in shard.chunks:
            sums, *m2s = [wait() for wait in scattered.popleft()]
            scattered.extend(islice(unsent, 1))
            total, total_m2 = shard.mean[chunk.among_shards], m2[chunk.among_shards]
            rows = m2s[0] if m2s else ()
            combine_moments(sums, rows, self.weights, total, total_m2, fused=fused)
        shard.mean.div_(len(self.weights))
        scaled = shard.mean.clone()
        shard.begin(self._groups, self.state.momentum)
        for group in self.state.base.param_groups:
            self._scale_group(group, shard, m2, scaled)
        for span in shard.spans:
            square = squared_norm(shard.mean[span.shard_slice])
            self.squares[span.parameter] = square + self.squares.get(span.parameter, 0)
        scaled = scaled.to(buffer.dtype)
        gathering = [
            chunk.gather(scaled[chunk.among_shards], buffer[chunk.whole]) for chunk in shard.chunks
        ]
        yield
        for wait in gathering:
            wait()
        future.set_result(buffer)

    def _scatter(self, shard: Shard, chunk: Chunk, sums: Tensor) -> list[Callable[[], Tensor]]:
        """Begins to scatter S of a chunk, and M2 if any rank has one."""
        waits = [chunk.scatter(sums)]
        if self.sends_m2:
            # bfloat16 has the range of the squares; its rounding changes r g by about 5e-4
            dtype = torch.float64 if sums.dtype is torch.float64 else torch.bfloat16
            chunk_m2, state = torch.zeros_like(sums, dtype=dtype), self.state
            for span in shard.spans_of(chunk.whole):
                parameter = span.parameter
                if parameter in self._groups:
                    _, (m2,) = state.moments.sums_and_m2s([parameter], state.sums_of)
                    flat = flattened(m2, parameter.stride())
                    chunk_m2[span.shard_slice] = flat[span.parameter_slice]
            waits.append(chunk.scatter(chunk_m2))
        return waits

    def _scale_group(self, group: dict[str, Any], shard: Shard, m2: Tensor, scaled: Tensor) -> None:
        """Scales the parameters of a bucket that are in one parameter group."""
        parameters = [p for p in shard.parameters if self._groups.get(p) is group]
        if not parameters:
            return
        numbers = {p: number for number, p in enumerate(parameters)}
        spans = [span for span in shard.spans if span.parameter in numbers]
        flats = shard.mean, m2, scaled
        totals, m2s, gradients = ([flat[s.shard_slice] for s in spans] for flat in flats)
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
        if self.state.checks_range:
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
