"""Scales gradients by GSNR inside the all-reduce of DistributedDataParallel."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import GradientError, SettingError, StateError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.ddp import ReducedShards, require_wrapped
from bigbatch.gradients.rank_reducer import ShardIndices, indices_in_runs, places_in_memory
from bigbatch.optim.apply_gsnr import AppliedGsnr, out_of_range
from bigbatch.optim.bucket_pipeline import BucketPipeline, future_on
from bigbatch.optim.bucket_shards import Shard, Span, all_gather
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.statistics.norms import flattened

_EPS = 1e-6  # that of torch's clipping
_FAULTS = (  # of which one on any rank refuses a step
    "the optimizer that was attached to this DDP model is gone; wrap the model again",
    "DDP's join() feeds zeros for ranks that have ended, which are no gradients: give every rank "
    "as many steps, as bigbatch.Batches does",
    "gradients were reduced twice in a step, and are r g since the first time; run every backward "
    "of a step but the last under ddp.no_sync() (static_graph=True must reduce its very first one: "
    "let the first step have one backward)",
)


# [Note: GSNR inside DDP's all-reduce]
# r needs the variance over the micro-batches of all ranks. To all-reduce M2 as well would double
# what is sent. An all-reduce is a scatter and a gather of shards. In between, a rank has one shard
# of every rank's sums: it computes mean, M2 and r there, and r g is gathered in place of the mean.
# - The scatter is an all-to-all, since gloo's reduce-scatter sends as much as an all-reduce.
# - A shard is a slice of a bucket, which cuts parameters anywhere, so means of layers need a small
#   all-reduce (`BucketPipeline`). In the first step one bucket is the whole model: chunks bound the
#   memory. Then DDP rebuilds its buckets, other ranks own the elements, and p moves (`_shard_of`).
# - All ranks must send in one order. So only the thread of DDP's hooks sends, when the next bucket
#   is ready; from callbacks of futures, collectives of different ranks matched wrongly, unnoticed.
# - The variance is complete after the last backward, so the others run under no_sync. A second
#   reduction would take r g for g: it is refused, and `.grad` must not be written to.
# - An exception in a hook breaks DDP on the other ranks. So they exchange faults before the first
#   bucket (`_start`), average the gradients of a refused step, and `step()` raises on all alike.
# - `.grad` is r g, so |g| and the mean come from the shards (`ReducedShards`). The next p is taken
#   by `step()` alone, which a GradScaler may skip.
class DDPCommHook(ReducedShards, Subscriber):
    """State of the communication hook that scales gradients: [Note: GSNR inside DDP's all-reduce].

    After a step's last backward `.grad` is r g, the same on every rank, bit for bit. Each element
    of p is on one rank; `consolidate` gathers p on all ranks before `state_dict()`.
    """

    def __init__(self, ddp: DistributedDataParallel, state: GsnrState) -> None:
        self.ranks = dist.get_world_size(ddp.process_group)
        self._ddp = weakref.ref(ddp)  # DDP keeps the hook in C++, unseen by the garbage collector
        self._live_state: GsnrState | None = state  # None after `release`
        self._group: dist.ProcessGroup = ddp.process_group
        self._refusal = ""  # why the current step is refused
        self._taken = False  # whether step() has used the current step's gradients
        self._shards: dict[int, Shard] = {}  # by the number of the bucket
        self._spans: dict[Tensor, list[tuple[Shard, Span]]] = {}  # this rank's, by parameter
        self._pipeline: BucketPipeline | None = None  # of the current step
        self._host_group = self._group  # for messages during a backward without a device wait
        if not next(ddp.parameters()).is_cpu:
            # of some ranks only, torch names it by the number of groups that a rank is in, which
            # must be equal on all of them
            is_subset = self.ranks < dist.get_world_size()
            self._host_group = dist.new_group(
                dist.get_process_group_ranks(self._group),
                backend="gloo",
                use_local_synchronization=is_subset,
            )
        ddp.register_comm_hook(self, DDPCommHook.reduce)

    def release(self) -> None:
        """Refuses all further steps, since the optimizer no longer exists."""
        self._live_state = None

    # for users

    @property
    def grad_norm(self) -> Tensor:
        """|g| over the optimizer's parameters, before r, in the unit of the losses; 0-dim.

        Raises:
            GradientError: the current step is not reduced yet.
        """
        all_squares = self._require_done("grad_norm").squares
        parameters = set(self._state.parameters())
        squares = [square for p, square in all_squares.items() if p in parameters]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def clip_grad_norm_(self, max_norm: float, scaler: GradScaler | None = None) -> Tensor:
        """Multiplies r g by the factor of torch's clipping of g: max_norm / |g| if that is below 1.

        Args:
            max_norm: largest |g|, without the scaler's scale.
            scaler: the scaler of the losses. Call `scaler.unscale_(optimizer)` before, as usual.
        Returns:
            |g| before clipping.
        Raises:
            GradientError: the current step is not reduced yet.
        """
        norm = self.grad_norm
        if scaler is not None:
            norm = norm / scaler.scale(torch.ones_like(norm))
        grads = [p.grad for p in self._state.parameters() if p.grad is not None]
        factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
        with torch.no_grad():
            torch._foreach_mul_(grads, factor)
        self.after_scale(factor)
        return norm

    def consolidate(self) -> None:
        """Gathers all of p on every rank, for `state_dict()`. Collective."""
        for _, shard in sorted(self._shards.items()):
            shard.gather(self._state.momentum)

    def __reduce__(self) -> Any:
        """A copy of the DDP model has None in place of the hook's state."""
        return type(None), ()

    # gradient scaling

    @property
    def has_untaken_step(self) -> bool:
        """Whether `.grad` is r g and no `step()` has used it."""
        return self.done and not self._taken

    @property
    def scattered(self) -> set[Tensor]:
        """The parameters whose p is scattered over the ranks."""
        return {parameter for shard in self._shards.values() for parameter in shard.steps}

    def is_of(self, ddp: DistributedDataParallel) -> bool:
        """Whether this is the hook of the model."""
        return self._ddp() is ddp

    def apply(self, source: GradientSource, *, may_step: bool = False) -> AppliedGsnr:
        """Takes the gradients that the last reduction has scaled, and the next p."""
        pipeline = self._require_done("step()")
        if self._taken:
            raise GradientError("step() was called twice for one backward; .grad is r g already")
        pipeline.require_all_reduced()
        self._taken = True
        for shard in self._shards.values():
            shard.commit(self._state.momentum)
        agrees = self._state.checks_agreement and not pipeline.live.any() and bool(self.grad_norm)
        bad_layers = out_of_range(pipeline.checked, pipeline.out_of_range)
        return AppliedGsnr(pipeline.k, pipeline.layers, agrees, bad_layers)

    def clear(self) -> None:
        """Drops all shards; the optimizer's momentum has all of p on every rank."""
        self._shards.clear()
        self._spans.clear()
        self.layout += 1

    def require_consolidated(self) -> None:
        """Raises StateError if p is scattered over the ranks."""
        if not self.scattered <= self._state.momentum.keys():
            raise StateError(
                "p, the average of r, is spread over the ranks: call optimizer.attached."
                "consolidate() on every rank before state_dict(), which sends nothing"
            )

    # shards of the mean gradient

    @property
    def done(self) -> bool:
        """Whether `.grad` of the current step is r g."""
        return self._pipeline is not None and self._pipeline.done

    def local_grad(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """This rank's elements of a parameter's mean gradient, before r; flat."""
        if grad is None:
            return None
        parts = [shard.mean[span.shard_slice] for shard, span in self._spans.get(parameter, ())]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else parameter.new_zeros(0)

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's elements of a tensor shaped like the parameter."""
        flat = flattened(full, parameter.stride())
        parts = [flat[span.parameter_slice] for _, span in self._spans.get(parameter, ())]
        return torch.cat(parts) if parts else flat[:0]

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a parameter this rank has."""
        slices = [span.parameter_slice for _, span in self._spans.get(parameter, ())]
        positions = places_in_memory(count, parameter.shape, parameter.stride())
        return indices_in_runs(positions, [(s.start, s.stop - s.start) for s in slices])

    def after_scale(self, factor: float | Tensor) -> None:
        """Rescales the norms after the gradients were multiplied by a factor."""
        if self._pipeline is not None:
            for square in self._pipeline.squares.values():
                square.mul_(factor**2)

    # reduction

    def begin(self) -> None:
        """A step begins."""
        self._pipeline, self._refusal, self._taken = None, "", False

    @torch.no_grad()
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Reduces and scales DDP's next bucket; as the communication hook, with `self` as state."""
        if bucket.index() == 0 and not self.unreduced:
            self._start()
        if self.unreduced or self._pipeline is None:
            buffer = bucket.buffer()
            if not self.unreduced:  # a refused step: the plain mean, for other optimizers
                dist.all_reduce(buffer, group=self._group)
                buffer.div_(self.ranks)
            future = future_on(buffer.device)
            future.set_result(buffer)
            return future
        future = self._pipeline.take(self._shard_of(bucket), bucket.buffer())
        if bucket.is_last():
            shards = [shard for _, shard in sorted(self._shards.items())]
            self._pipeline.end([p for shard in shards for p in shard.parameters])
        return future

    def _start(self) -> None:
        """Exchanges the ranks' micro-batch counts and weights; all ranks refuse the same steps."""
        ddp, state = self._ddp(), self._live_state
        joins = ddp is not None and bool(ddp._join_config.enable)
        is_repeated = self._pipeline is not None or bool(self._refusal)
        counted = (0, 0.0) if state is None else (state.moments.micro_batches, state.moments.weight)
        message = [*counted, state is None, joins, is_repeated]
        row = torch.tensor(message, dtype=torch.float64, device="cpu")
        rows = row.new_empty(self.ranks * len(row))
        all_gather(rows, row, group=self._host_group)
        counts, weights, *faults = rows.view(self.ranks, -1).T.tolist()
        k = round(sum(counts))
        reasons = [text for text, on_ranks in zip(_FAULTS, faults, strict=True) if any(on_ranks)]
        if k < 2:
            reasons.append(
                f"{k} micro-batches over all ranks in a step: r needs at least 2 (8 are better)"
            )
        self._pipeline, self._refusal = None, next(iter(reasons), "")
        if state is not None and not self._refusal:
            self._pipeline = BucketPipeline(state, self._group, weights, k, max(counts) > 1)

    def _shard_of(self, bucket: Any) -> Shard:
        """This rank's shard of a bucket; if DDP has rebuilt its buckets, p moves to new shards."""
        index, parameters = bucket.index(), bucket.parameters()
        shard = self._shards.get(index)
        if shard is None or not shard.is_of(parameters, bucket.buffer()):
            for number in sorted(n for n in self._shards if n >= index):
                self._shards.pop(number).gather(self._state.momentum)
            start = bucket.buffer().storage_offset()
            starts = [gradient.storage_offset() - start for gradient in bucket.gradients()]
            offsets = list(zip(parameters, starts, strict=True))
            shard = self._shards[index] = Shard(offsets, bucket.buffer(), self._group)
            self.layout += 1
            self._spans.clear()
            for any_shard in self._shards.values():
                for span in any_shard.spans:
                    self._spans.setdefault(span.parameter, []).append((any_shard, span))
        return shard

    def _require_done(self, caller: str) -> BucketPipeline:
        if self._refusal:
            raise GradientError(self._refusal)
        if self._pipeline is None or not self._pipeline.done:
            raise GradientError(
                f"{caller} comes after the last backward of a step, which must not run under "
                "no_sync"
            )
        return self._pipeline

    @property
    def _state(self) -> GsnrState:
        assert self._live_state is not None  # else the step is refused
        return self._live_state


def require_attachable(ddp: Any, parameters: Sequence[Tensor]) -> None:
    """Raises SettingError if gradients cannot be scaled under this DDP model."""
    if not isinstance(ddp, DistributedDataParallel):
        raise SettingError(
            f"attach() takes the DistributedDataParallel model, not {type(ddp).__name__}; under "
            "fully_shard, and in one process, leave attach() out"
        )
    if ddp._comm_hooks:
        raise SettingError(
            "the model has a communication hook already, and DDP takes one; wrap the model again, "
            "and register no hook but that of attach()"
        )
    require_wrapped(ddp, parameters)
