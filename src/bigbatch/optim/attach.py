"""Variance reduction under DistributedDataParallel, inside the all-reduce of the gradients.

A bucket is dealt to the ranks, each computes r g of its shard, and that is gathered. Everything is
sent by the thread that runs DDP's hooks, in the order of the buckets, so in one order on all ranks:
a bucket is dealt when it is ready, folded when the next one is, and finished after that.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import GradientError, SettingError, StateError
from bigbatch.measure.devices import wide
from bigbatch.measure.moments import GradientMoments
from bigbatch.measure.norms import flattened, squared_norm
from bigbatch.measure.source.ddp import FOLDED
from bigbatch.optim.average import Averages
from bigbatch.optim.exchange import levels_of
from bigbatch.optim.fold import How, Layer, fold
from bigbatch.optim.shards import Bucket, Shard, Span

Groups = Literal["all", "ranks"]

_EPS = 1e-6  # as torch's own clipping has it


class Rule(Protocol):
    """What an attachment asks of the optimizer that it folds for."""

    watch: bool
    """Whether to tell what was done."""
    averages: Averages
    """p, where it is not on the shards."""
    moments: GradientMoments
    """Of this rank's micro-batches."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with vr and beta3."""

    def how(self, group: dict[str, Any], weight: float, k: int) -> How:
        """The settings of a group for a step of so much weight and so many micro-batches."""


class Attachment:
    """A variance-reduced optimizer under DDP: its fold, and the true gradient's norm.

    After the last backward of a step `.grad` holds r g on every rank, bit for bit the same. Every
    backward of a step but the last runs under `no_sync`. p of a weight is on one rank;
    `consolidate` brings it to all before the optimizer's `state_dict()`.

    A subscriber of the source of the optimizer's gradients, to know their weights.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        rule: Rule,
        groups: Groups,
        m2_dtype: torch.dtype | None,
        node_group: dist.ProcessGroup | None,
        *,
        fused: bool,
    ) -> None:
        self.ranks = dist.get_world_size(ddp.process_group)
        self.by_ranks = groups == "ranks"
        self.layout = 0
        self.told: dict[Tensor, Tensor] = {}  # of the last step, where the rule is watched
        self.early = False  # whether the next reduction is to leave each rank its own gradient
        self.done = False  # whether the present step is folded
        self.k = 0  # micro-batches of the step, over all ranks
        self.live = torch.zeros(())  # weights whose micro-batches do not agree to rounding
        # DDP keeps this for as long as it lives, out of the garbage collector's sight
        self._ddp, self._rule_ref = weakref.ref(ddp), weakref.ref(rule)
        self._group: dist.ProcessGroup = ddp.process_group
        self._levels = levels_of(ddp.process_group, node_group)
        self._m2_dtype, self._fused = m2_dtype, fused
        self._refusal = ""  # of the present step
        self._own = [0.0, 0.0]  # micro-batches and their weight, on this rank
        self._weights: list[float] = []  # of each rank
        self._sends_m2 = False
        self._shards: dict[int, Shard] = {}  # by the number of the bucket
        self._of: dict[Tensor, list[tuple[Shard, Span]]] = {}  # a parameter's elements here
        self._grouped: dict[Tensor, dict[str, Any]] = {}  # groups with vr, by parameter
        self._flying: list[Bucket] = []
        self._squares: dict[Tensor, Tensor] = {}  # |g|^2, of this rank's elements, then of all
        self._host = _host_group(ddp)
        ddp.register_comm_hook(self, fold_hook)
        FOLDED[ddp] = self

    # what users ask

    @property
    def grad_norm(self) -> Tensor:
        """|g| of all that the optimizer trains, before r, in the unit of the losses; 0-dim.

        Raises:
            GradientError: the present step has not been reduced.
        """
        self._require_done("grad_norm")
        trained = {p for group in self._rule.param_groups for p in group["params"]}
        squares = [square for p, square in self._squares.items() if p in trained]
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
        trained = (p.grad for group in self._rule.param_groups for p in group["params"])
        grads = [grad for grad in trained if grad is not None]
        with torch.no_grad():
            torch._foreach_mul_(grads, (max_norm / (norm + _EPS)).clamp(max=1.0))
        return norm

    def consolidate(self) -> None:
        """Brings p of every weight to every rank, for `state_dict()`. Collective."""
        for _, shard in sorted(self._shards.items()):
            shard.bring(self._rule.averages)

    # what the optimizer asks

    def is_of(self, ddp: DistributedDataParallel) -> bool:
        """Whether it folds in that model."""
        return self._ddp() is ddp

    def commit(self) -> None:
        """The step is taken, and p with it."""
        self._require_done("step()")
        for shard in self._shards.values():
            shard.commit(self._rule.averages)

    def forget(self) -> None:
        """p is the optimizer's own from here on, whole on every rank."""
        self._shards.clear()
        self._of.clear()
        self.layout += 1

    def require_consolidated(self) -> None:
        """Raises StateError where p is on the ranks that compute it only."""
        averages = self._rule.averages
        if not all(shard.is_brought(averages) for shard in self._shards.values()):
            raise StateError(
                "p, the average of r, is spread over the ranks: call optimizer.attached."
                "consolidate() on every rank before state_dict(), which sends nothing"
            )

    # what the source asks

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's elements of the mean gradient of a parameter, flat; before r."""
        parts = [shard.mean[span.here] for shard, span in self._of.get(parameter, ())]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else parameter.new_zeros(0)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's elements of any tensor that is shaped like the parameter."""
        flat = flattened(whole, parameter.stride())
        parts = [flat[span.there] for _, span in self._of.get(parameter, ())]
        return torch.cat(parts) if parts else flat[:0]

    def scale(self, factor: float) -> None:
        """The gradients were multiplied."""
        for square in self._squares.values():
            square.mul_(factor**2)

    # a subscriber

    def begin(self) -> None:
        """A step starts."""
        self.done, self._refusal = False, ""
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
        """Takes the next bucket, and the ones before it a stage further."""
        if bucket.index() == 0 and not self.early:
            self._start(bucket.buffer().device)
        if self.early or self._refusal:
            untouched: Future[Tensor] = Future()
            untouched.set_result(bucket.buffer())
            return untouched
        shard = self._shard_of(bucket)
        m2 = self._m2_of if self._sends_m2 else None
        self._flying.append(Bucket(shard, bucket.buffer(), m2, self._m2_dtype))
        future = self._flying[-1].future
        ready = 0 if bucket.is_last() else 1
        for flying in self._flying[: len(self._flying) - ready]:
            if not flying.folded:
                self._fold(flying)
        ready = 0 if bucket.is_last() else 2
        while len(self._flying) > ready:
            self._flying.pop(0).finish()
        if bucket.is_last():
            self._end()
        return future

    def _start(self, device: torch.device) -> None:
        """Tells the other ranks of this one's micro-batches; a refusal is everybody's.

        It is raised by `step()`: an error in the middle of a backward would break DDP.
        """
        self._flying.clear()
        self._squares.clear()
        self.told.clear()
        self.live = torch.zeros((), dtype=wide(device), device=device)
        ddp, rule = self._ddp(), self._rule_ref()
        joining = ddp is not None and bool(ddp._join_config.enable)
        again = self.done or bool(self._refusal)
        facts = [*self._own, again, joining, rule is None]
        mine = torch.tensor(facts, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(rows, mine, group=self._host)
        counts, self._weights, *wrong = torch.stack(rows).T.tolist()
        self.k = sum(map(bool, counts)) if self.by_ranks else round(sum(counts))
        self._refusal = self._refusal_of(*map(any, wrong))
        self.done = False
        self._sends_m2 = not self.by_ranks and max(counts) > 1
        self._grouped = {
            p: group
            for group in (rule.param_groups if rule is not None else ())
            for p in group["params"]
            if group["vr"]
        }

    def _refusal_of(self, again: bool, joining: bool, gone: bool) -> str:
        """What makes this reduction impossible; nothing where it is possible."""
        if gone:
            return "the optimizer that was attached to this DDP model is gone; wrap the model anew"
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
        if self.k < 2:
            of_what = "ranks with gradients" if self.by_ranks else "micro-batches over all ranks"
            return f"{self.k} {of_what} in a step: r needs at least 2 (8 are better)"
        return ""

    def _shard_of(self, bucket: Any) -> Shard:
        """What this rank has of a bucket; where DDP has made it anew, p moves."""
        index, parameters = bucket.index(), bucket.parameters()
        shard = self._shards.get(index)
        if shard is None or not shard.is_of(parameters, bucket.buffer()):
            for number in sorted(n for n in self._shards if n >= index):
                self._shards.pop(number).bring(self._rule.averages)
            start = bucket.buffer().storage_offset()
            places = [
                (p, g.storage_offset() - start)
                for p, g in zip(parameters, bucket.gradients(), strict=True)
            ]
            shard = self._shards[index] = Shard(places, bucket.buffer(), self._levels)
            self.layout += 1
            self._of.clear()
            for each in self._shards.values():
                for span in each.spans:
                    self._of.setdefault(span.parameter, []).append((each, span))
        return shard

    def _m2_of(self, parameter: Tensor) -> Tensor | None:
        """M2 of this rank's micro-batches, flat as in the bucket; None where nobody asks for it."""
        if parameter not in self._grouped:
            return None
        _, m2 = self._rule.moments.of(parameter)
        return flattened(m2, parameter.stride())

    def _fold(self, flying: Bucket) -> None:
        """r g on this rank's shard, whence it is gathered."""
        shard = flying.shard
        m2 = flying.receive(self._weights, fused=self._fused)
        shard.mean.div_(self.ranks)
        folded = shard.mean.clone()
        shard.begin(self._grouped, self._rule.averages)
        for group in self._rule.param_groups:
            inside = [p for p in shard.parameters if self._grouped.get(p) is group]
            if inside:
                self._fold_group(group, inside, shard, m2, folded)
        for span in shard.spans:
            self._add(self._squares, span.parameter, squared_norm(shard.mean[span.here]))
        flying.send_back(folded)

    def _fold_group(
        self, group: dict[str, Any], inside: list[Tensor], shard: Shard, m2: Tensor, folded: Tensor
    ) -> None:
        numbers = {p: number for number, p in enumerate(inside)}
        spans = [span for span in shard.spans if span.parameter in numbers]
        layers = [
            Layer(shard.mean[s.here], m2[s.here], folded[s.here], *shard.average_of(s, group))
            for s in spans
        ]
        of_span = [numbers[span.parameter] for span in spans]
        joined = _Joined(of_span, len(inside), self._group, folded.device)
        weight = sum(self._weights) / self.ranks**2  # the means are S / ranks
        told = fold(self._rule.how(group, weight, self.k), layers, joined)
        if joined.sums is not None:
            self.live += joined.sums[:, 1].sum()
        else:
            self.live += 1  # which no rule without a layer mean tells
        if self._rule.watch:
            joined(told)
            assert joined.sums is not None
            self.told.update(zip(inside, joined.sums, strict=True))

    def _end(self) -> None:
        """|g|^2 of every parameter, over all ranks."""
        parameters = [p for _, shard in sorted(self._shards.items()) for p in shard.parameters]
        device = parameters[0].device
        zero = torch.zeros((), dtype=wide(device), device=device)
        squares = torch.stack([self._squares.get(p, zero).to(zero) for p in parameters])
        dist.all_reduce(squares, group=self._group)
        self._squares = dict(zip(parameters, squares, strict=True))
        self.done = True

    @staticmethod
    def _add(sums: dict[Tensor, Tensor], parameter: Tensor, value: Tensor) -> None:
        sums[parameter] = value + sums[parameter] if parameter in sums else value

    def _require_done(self, what: str) -> None:
        if self._refusal:
            raise GradientError(self._refusal)
        if not self.done:
            raise GradientError(
                f"{what} comes after the last backward of a step, which is not to run under no_sync"
            )

    @property
    def _rule(self) -> Rule:
        rule = self._rule_ref()
        assert rule is not None  # or the step is refused
        return rule


def _host_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """For what the host has to know during a backward, without waiting for a device."""
    group: Any = ddp.process_group
    if not next(ddp.parameters()).is_cpu:
        ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    found: dist.ProcessGroup = group
    return found


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


def fold_hook(state: Attachment, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook, whose state is the attachment."""
    return state.reduce(bucket)


def require_attachable(ddp: Any, parameters: Sequence[Tensor], groups: str) -> None:
    """Raises SettingError where an optimizer cannot fold under this wrapper."""
    if groups not in ("all", "ranks"):
        raise SettingError(f'groups={groups!r} is unknown; choose "all" or "ranks"')
    if not isinstance(ddp, DistributedDataParallel):
        raise SettingError(
            f"attach() takes the DistributedDataParallel model, not {type(ddp).__name__}; under "
            "fully_shard, and on one process, nothing has to be attached"
        )
    if ddp._comm_hooks:
        raise SettingError(
            "the model has a communication hook already, and DDP takes one; wrap it anew, and let "
            "attach() be the only one"
        )
    shared = set(ddp.parameters())
    if any(p.requires_grad and p not in shared for p in parameters):
        raise SettingError("a parameter of the optimizer stands outside the DDP wrapper")
