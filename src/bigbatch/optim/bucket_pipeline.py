"""One reduction of DDP's buckets: from every rank's sums to r g on all of them.

Everything is sent by the thread that runs DDP's hooks, in the order of the buckets, so in one order
on all ranks: a bucket is scattered when it is ready, scaled when the next one is, and gathered
after that. So two of them are in flight while the backward continues.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from bigbatch.errors import GradientError
from bigbatch.gradients import changed_later
from bigbatch.gradients.dtypes import widest_float
from bigbatch.optim.apply_gsnr import Layer, apply_gsnr
from bigbatch.optim.bucket_shards import Bucket, Shard
from bigbatch.optim.functional import share_out_of_range
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.statistics.norms import flattened, squared_norm


class BucketPipeline:
    """The reduction of one step.

    Attributes:
        done: whether every bucket was taken.
        layers: of each parameter what `apply_gsnr` returns, over all ranks, where r is watched.
        squares: |g|^2 of each parameter of the model, when done.
        out_of_range: of each layer on this rank, the share of M2 that is, where that is checked.
        live: elements whose groups do not agree to rounding; at least 1 where that is unknown.

    Args:
        state: of the optimizer.
        group: of the ranks.
        weights: of each rank's micro-batches.
        k: how many groups are compared.
        sends_m2: whether a rank has an M2 of its own.
        m2_dtype: in which that is sent; None: see `Bucket`.
        fused: whether compiled kernels may join the ranks' moments.
    """

    def __init__(
        self,
        state: GsnrState,
        group: dist.ProcessGroup,
        weights: list[float],
        k: int,
        *,
        sends_m2: bool,
        m2_dtype: torch.dtype | None,
        fused: bool,
    ) -> None:
        self.done = False
        self.k = k
        self.layers: dict[Tensor, Tensor] = {}
        self.squares: dict[Tensor, Tensor] = {}
        self.out_of_range: list[tuple[Tensor, Tensor]] = []
        self.live = torch.zeros(())
        self._state, self._group, self._weights = state, group, weights
        self._sends_m2, self._m2_dtype, self._fused = sends_m2, m2_dtype, fused
        self._groups = {  # with vr
            p: group for group in state.param_groups if group["vr"] for p in group["params"]
        }
        self._flying: list[Bucket] = []

    def take(self, shard: Shard, buffer: Tensor) -> Future[Tensor]:
        """Scatters a bucket, and takes those before it a stage further."""
        m2 = self._m2_of if self._sends_m2 else None
        self._flying.append(Bucket(shard, buffer, m2, self._m2_dtype))
        future = self._flying[-1].future
        self._advance(unscaled=1, in_flight=2)
        return future

    def end(self, parameters: list[Tensor]) -> None:
        """Finishes every bucket, and adds |g|^2 of every parameter up over the ranks."""
        self._advance(unscaled=0, in_flight=0)
        device = parameters[0].device
        zero = torch.zeros((), dtype=widest_float(device), device=device)
        squares = torch.stack([self.squares.get(p, zero).to(zero) for p in parameters])
        dist.all_reduce(squares, group=self._group)
        self.squares = dict(zip(parameters, squares, strict=True))
        self.done = True

    def require_all_in(self) -> None:
        """Raises GradientError where a gradient was not reduced, or r is not that of it."""
        for group in self._state.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.squares:
                    raise GradientError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient that DDP "
                        "did not reduce (unfrozen, or given to the optimizer, after the model was "
                        "wrapped?); wrap the model again, and attach the optimizer to that"
                    )
                if self._sends_m2 and parameter in self._groups and changed_later(parameter):
                    raise GradientError(
                        "a hook that was put on a parameter after attach() changes its gradient "
                        "after it was seen; put it on before"
                    )

    def _advance(self, unscaled: int, in_flight: int) -> None:
        """Scales all buckets but the last `unscaled`, and finishes all but the last `in_flight`."""
        for flying in self._flying[: len(self._flying) - unscaled]:
            if not flying.scaled:
                self._scale(flying)
        while len(self._flying) > in_flight:
            self._flying.pop(0).finish()

    def _m2_of(self, parameter: Tensor) -> Tensor | None:
        """M2 of this rank's micro-batches, flat as in the bucket; None without vr."""
        if parameter not in self._groups:
            return None
        _, m2 = self._state.moments.of(parameter)
        return flattened(m2, parameter.stride())

    def _scale(self, flying: Bucket) -> None:
        """Computes r g on this rank's shard, and starts to gather it."""
        shard, ranks = flying.shard, len(self._weights)
        m2 = flying.receive(self._weights, fused=self._fused)
        shard.mean.div_(ranks)
        scaled = shard.mean.clone()
        shard.begin(self._groups, self._state.momentum)
        for group in self._state.param_groups:
            inside = [p for p in shard.parameters if self._groups.get(p) is group]
            if inside:
                self._scale_group(group, inside, shard, m2, scaled)
        for span in shard.spans:
            square = squared_norm(shard.mean[span.shard_slice])
            self.squares[span.parameter] = square + self.squares.get(span.parameter, 0)
        flying.send_back(scaled)

    def _scale_group(
        self, group: dict[str, Any], inside: list[Tensor], shard: Shard, m2: Tensor, scaled: Tensor
    ) -> None:
        """Scales what of a bucket is in one parameter group."""
        numbers = {p: number for number, p in enumerate(inside)}
        spans = [span for span in shard.spans if span.parameter in numbers]
        layers = [
            Layer(
                shard.mean[s.shard_slice],
                m2[s.shard_slice],
                scaled[s.shard_slice],
                *shard.average_of(s, group),
            )
            for s in spans
        ]
        of_span = [numbers[span.parameter] for span in spans]
        joined = _Joined(of_span, len(inside), self._group, scaled.device)
        weight = sum(self._weights) / len(self._weights) ** 2  # the means are S / ranks
        if self._state.warnings.checks_range:
            self.out_of_range += [
                (span.parameter, share_out_of_range(layer.total, layer.m2, weight))
                for span, layer in zip(spans, layers, strict=True)
            ]
        rows = apply_gsnr(self._state.options(group, weight, self.k), layers, joined)
        self.live = self.live + (1 if joined.sums is None else joined.sums[:, 1].sum())
        if self._state.watch:
            joined(rows)
            assert joined.sums is not None
            self.layers.update(zip(inside, joined.sums, strict=True))


class _Joined:
    """Sums of layers whose elements are on several ranks, and in several spans on each."""

    def __init__(
        self, of_span: list[int], layers: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.sums: Tensor | None = None  # of the last call, (layers, columns)
        self._of_span = torch.tensor(of_span, dtype=torch.int64, device=device)
        self._layers, self._group, self._device = layers, group, device

    def __call__(self, numbers: Tensor) -> None:
        sums = numbers.new_zeros(self._layers, numbers.shape[1], device=self._device)
        sums.index_add_(0, self._of_span, numbers.to(self._device))
        dist.all_reduce(sums, group=self._group)
        numbers.copy_(sums[self._of_span])
        self.sums = sums
