"""Scales gradients by GSNR inside the all-reduce of DistributedDataParallel."""

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import GradientError, SettingError, StateError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.ddp import ReducedShards, require_wrapped
from bigbatch.gradients.shard_indices import ShardIndices, indices_in_runs, places_in_memory
from bigbatch.optim.apply_gsnr import AppliedGsnr, out_of_range
from bigbatch.optim.bucket_pipeline import BucketPipeline
from bigbatch.optim.bucket_shards import Shard, Span, future_on
from bigbatch.optim.collectives import levels_of, new_group
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.statistics.norms import flattened

Groups = Literal["all", "ranks"]

_EPS = 1e-6  # as torch's own clipping has it


class DDPCommHook(ReducedShards):
    """State of the communication hook that scales gradients, and the norm of the mean gradient.

    After the last backward of a step `.grad` holds r g on every rank, bit for bit the same. Every
    backward of a step but the last runs under `no_sync`. p of a weight is on one rank;
    `consolidate` gathers it on all before the optimizer's `state_dict()`.

    A subscriber of the source of the optimizer's gradients, to know their weights.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: GsnrState,
        groups: Groups,
        m2_dtype: torch.dtype | None,
        node_group: dist.ProcessGroup | None,
    ) -> None:
        self.ranks = dist.get_world_size(ddp.process_group)
        self.by_ranks = groups == "ranks"
        self._ddp = weakref.ref(ddp)  # which keeps this, out of the garbage collector's sight
        self._gsnr: GsnrState | None = state  # until its optimizer is gone
        self._group: dist.ProcessGroup = ddp.process_group
        self._levels = levels_of(ddp.process_group, node_group)
        self._m2_dtype = m2_dtype
        self._refusal = ""  # of the current step
        self._taken = False  # whether step() has used it
        self._own = [0.0, 0.0]  # micro-batches and their weight, on this rank
        self._shards: dict[int, Shard] = {}  # by the number of the bucket
        self._spans: dict[Tensor, list[tuple[Shard, Span]]] = {}  # a parameter's elements here
        self._reduction: BucketPipeline | None = None  # of the current step
        self._host = _host_group(ddp)
        ddp.register_comm_hook(self, gsnr_hook)

    def release(self) -> None:
        """The optimizer is gone: the next step is refused."""
        self._gsnr = None

    # what users ask

    @property
    def grad_norm(self) -> Tensor:
        """|g| of all that the optimizer trains, before r, in the unit of the losses; 0-dim.

        Raises:
            GradientError: the present step has not been reduced.
        """
        squares_of = self._require_done("grad_norm").squares
        trained = {p for group in self._state.param_groups for p in group["params"]}
        squares = [square for p, square in squares_of.items() if p in trained]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def clip_grad_norm_(self, max_norm: float, scaler: GradScaler | None = None) -> Tensor:
        """Shortens r g as torch's clipping would shorten g: by max_norm / |g| where that is < 1.

        Args:
            max_norm: greatest |g|, without the scaler's scale.
            scaler: of the losses. Its `unscale_(optimizer)` comes before, as ever.
        Returns:
            |g| before it.
        """
        norm = self.grad_norm
        if scaler is not None:
            norm = norm / scaler.scale(torch.ones_like(norm))
        trained = (p.grad for group in self._state.param_groups for p in group["params"])
        grads = [grad for grad in trained if grad is not None]
        share = (max_norm / (norm + _EPS)).clamp(max=1.0)
        with torch.no_grad():
            torch._foreach_mul_(grads, share)
        self.after_scale(share)
        return norm

    def consolidate(self) -> None:
        """Gathers p of every parameter on every rank, for `state_dict()`. Collective."""
        for _, shard in sorted(self._shards.items()):
            shard.bring(self._state.momentum)

    def __reduce__(self) -> Any:
        """A copy of the DDP model is not attached."""
        return _nobody, ()

    # where gradients are scaled

    @property
    def subscribers(self) -> list[Subscriber]:
        """This hook, for weights; the moments too, where a rank has several micro-batches."""
        return [self] if self.by_ranks else [self, self._state.moments]

    def bind(self, source: GradientSource) -> None:
        """Under no_sync `.grad` is this rank's sum, which the moments read."""
        self._state.moments.sum_guard = source.guard

    def is_pending(self, source: GradientSource) -> bool:
        """Whether there are gradients that no step has used."""
        return source.micro_batches > 0 or (self.done and not self._taken)

    def keeps(self, parameter: Tensor) -> bool:
        """Whether p of it is spread over the ranks."""
        return any(shard.keeps(parameter) for shard in self._shards.values())

    def is_of(self, ddp: DistributedDataParallel) -> bool:
        """Whether it is the hook of that model."""
        return self._ddp() is ddp

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Takes what the last reduction has scaled, and p with it.

        Raises:
            GradientError: the step was not reduced, was refused, or is taken already.
        """
        done = self._require_done("step()")
        if self._taken:
            raise GradientError("step() was called twice for one backward; .grad is r g already")
        done.require_all_in()
        self._taken = True
        for shard in self._shards.values():
            shard.commit(self._state.momentum)
        checks = self._state.warnings.checks_agreement
        agree = checks and not done.live.any() and bool(self.grad_norm)
        shares = done.out_of_range
        bad_layers = out_of_range([p for p, _ in shares], [share for _, share in shares])
        return AppliedGsnr(done.k, done.layers, agree, bad_layers)

    def forget(self) -> None:
        """p is the optimizer's own from here on, whole on every rank."""
        self._shards.clear()
        self._spans.clear()
        self.layout += 1

    def require_consolidated(self) -> None:
        """Raises StateError where p is on the ranks that compute it only."""
        momentum = self._state.momentum
        if not all(shard.is_brought(momentum) for shard in self._shards.values()):
            raise StateError(
                "p, the average of r, is spread over the ranks: call optimizer.attached."
                "consolidate() on every rank before state_dict(), which sends nothing"
            )

    # where the mean gradient is

    @property
    def done(self) -> bool:
        """Whether `.grad` of the current step is r g."""
        return self._reduction is not None and self._reduction.done

    def local_grad(self, parameter: Tensor) -> Tensor:
        """This rank's elements of the mean gradient of a parameter, flat; before r."""
        parts = [shard.mean[span.shard_slice] for shard, span in self._spans.get(parameter, ())]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else parameter.new_zeros(0)

    def shard(self, parameter: Tensor, full: Tensor) -> Tensor:
        """This rank's elements of any tensor that is shaped like the parameter."""
        flat = flattened(full, parameter.stride())
        parts = [flat[span.parameter_slice] for _, span in self._spans.get(parameter, ())]
        return torch.cat(parts) if parts else flat[:0]

    def shard_indices(self, parameter: Tensor, count: int) -> ShardIndices:
        """Which of the first `count` elements of a parameter are among them."""
        runs = [span.parameter_slice for _, span in self._spans.get(parameter, ())]
        places = places_in_memory(count, parameter.shape, parameter.stride())
        return indices_in_runs(places, [(run.start, run.stop - run.start) for run in runs])

    def after_scale(self, factor: float | Tensor) -> None:
        """The gradients were multiplied by `factor`."""
        if self._reduction is not None:
            for square in self._reduction.squares.values():
                square.mul_(factor**2)

    # a subscriber

    def begin(self) -> None:
        """A step starts."""
        self._reduction, self._refusal, self._taken = None, "", False
        self._own = [0.0, 0.0]

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""
        self._own = [self._own[0] + 1, self._own[1] + weight]

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """It is in the bucket, when it comes."""

    def end(self) -> None:
        """The micro-batch is complete."""

    # a reduction

    @torch.no_grad()
    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Takes DDP's next bucket."""
        if bucket.index() == 0 and not self.unreduced:
            self._start()
        if self.unreduced or self._reduction is None:
            buffer = bucket.buffer()
            if not self.unreduced:  # the mean, for whatever else steps along it
                dist.all_reduce(buffer, group=self._group)
                buffer.div_(self.ranks)
            future = future_on(buffer.device)
            future.set_result(buffer)
            return future
        future = self._reduction.take(self._shard_of(bucket), bucket.buffer())
        if bucket.is_last():
            shards = [shard for _, shard in sorted(self._shards.items())]
            self._reduction.end([p for shard in shards for p in shard.parameters])
        return future

    def _start(self) -> None:
        """Exchanges the ranks' micro-batches and weights; all ranks refuse a step alike.

        `step()` raises the error: one in the middle of a backward would break DDP. A refused step
        is averaged.
        """
        ddp, state = self._ddp(), self._gsnr
        joining = ddp is not None and bool(ddp._join_config.enable)
        again = self._reduction is not None or bool(self._refusal)
        message = [*self._own, again, joining, state is None]
        sent = torch.tensor(message, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(rows, sent, group=self._host)
        counts, weights, *wrong = torch.stack(rows).T.tolist()
        k = sum(map(bool, counts)) if self.by_ranks else round(sum(counts))
        self._reduction, self._refusal = None, self._refusal_of(k, *map(any, wrong))
        if state is not None and not self._refusal:
            self._reduction = BucketPipeline(
                state,
                self._group,
                weights,
                k,
                sends_m2=not self.by_ranks and max(counts) > 1,
                m2_dtype=self._m2_dtype,
                fused=state.fused is not False,
            )

    def _refusal_of(self, k: int, again: bool, joining: bool, gone: bool) -> str:
        """What makes this reduction impossible; nothing where it is possible."""
        if gone:
            return "the optimizer that was attached to this DDP model is gone; wrap the model again"
        if joining:
            return (
                "DDP's join() feeds zeros for ranks that have ended, which are no gradients: give "
                "every rank as many steps, as bigbatch.Batches does"
            )
        if again:
            return (
                "gradients were reduced twice in a step, and are r g since the first time; run "
                "every backward of a step but the last under ddp.no_sync() (static_graph=True must "
                "reduce its very first one: let the first step have one backward)"
            )
        if k < 2:
            of_what = "ranks with gradients" if self.by_ranks else "micro-batches over all ranks"
            return f"{k} {of_what} in a step: r needs at least 2 (8 are better)"
        return ""

    def _shard_of(self, bucket: Any) -> Shard:
        """What this rank has of a bucket; where DDP has made another, p moves."""
        index, parameters = bucket.index(), bucket.parameters()
        shard = self._shards.get(index)
        if shard is None or not shard.is_of(parameters, bucket.buffer()):
            for number in sorted(n for n in self._shards if n >= index):
                self._shards.pop(number).bring(self._state.momentum)
            start = bucket.buffer().storage_offset()
            places = [
                (p, g.storage_offset() - start)
                for p, g in zip(parameters, bucket.gradients(), strict=True)
            ]
            shard = self._shards[index] = Shard(places, bucket.buffer(), self._levels)
            self.layout += 1
            self._spans.clear()
            for each in self._shards.values():
                for span in each.spans:
                    self._spans.setdefault(span.parameter, []).append((each, span))
        return shard

    def _require_done(self, what: str) -> BucketPipeline:
        if self._refusal:
            raise GradientError(self._refusal)
        if self._reduction is None or not self._reduction.done:
            raise GradientError(
                f"{what} comes after the last backward of a step, which is not to run under no_sync"
            )
        return self._reduction

    @property
    def _state(self) -> GsnrState:
        assert self._gsnr is not None  # or the step is refused
        return self._gsnr


def _nobody() -> None:
    """The hook of a copy."""


def _host_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """For what the host has to know during a backward, without waiting for a device."""
    group: dist.ProcessGroup = ddp.process_group
    if next(ddp.parameters()).is_cpu:
        return group
    return new_group(group, [dist.get_process_group_ranks(group)], "gloo")


def gsnr_hook(state: DDPCommHook, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook."""
    return state.reduce(bucket)


def require_attachable(
    ddp: Any, parameters: Sequence[Tensor], groups: str, m2_dtype: torch.dtype | None
) -> None:
    """Raises SettingError where gradients cannot be scaled under this wrapper."""
    if groups not in ("all", "ranks"):
        raise SettingError(f'groups={groups!r} is unknown; choose "all" or "ranks"')
    if m2_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise SettingError(
            f"m2_dtype={m2_dtype} has not the range of squares; choose torch.bfloat16, float32 or "
            "float64"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise SettingError(
            f"attach() takes the DistributedDataParallel model, not {type(ddp).__name__}; under "
            "fully_shard, and on one process, nothing has to be attached"
        )
    if ddp._comm_hooks:
        raise SettingError(
            "the model has a communication hook already, and DDP takes one; wrap it again, and let "
            "attach() be the only one"
        )
    require_wrapped(ddp, parameters)
