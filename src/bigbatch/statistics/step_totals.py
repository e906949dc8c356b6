"""Totals of a step over micro-batches and ranks: one vector, one all-reduce, one host read."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import stacked, to_device, widest_float, without_autocast
from bigbatch.statistics.half_batch_cosine import HalfBatchCosine, cosine_of_halves
from bigbatch.statistics.norms import (
    ClusterNorms,
    MicroBatchNorms,
    count_layers,
    squared_norms,
    sum_by_layer,
)
from bigbatch.statistics.random_projection import ProjectionProbe, RandomProjections, leave_one_out

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Vector = TypeVar("Vector", Tensor, list[float])

_COUNTED = 3  # totals of a rank that the host knows: micro-batches, samples, failed

_ONE_PROCESS_TOLERANCE = 1e-4  # relative difference of .grad and the micro-batches' sum
_BFLOAT16_ROUNDING = 2**-8  # once per rank, since engines may reduce in bfloat16
_REPLICA_TOLERANCE = 1e-3  # squared norms of one tensor on several ranks, whose kernels may differ


class StepAccumulators:
    """The sums of a step over micro-batches and ranks; nothing waits for the device."""

    def __init__(
        self,
        source: GradientSource,
        layers: Mapping[Tensor, int],
        *,
        sketches: bool,
        half_batch_cosine: bool,
        cluster_parts: int | None,
    ) -> None:
        self.norms, self.probe = MicroBatchNorms(layers), ProjectionProbe(source)
        self.lengths: dict[str, int] = {}  # length of each part of the last packed vector
        self._source, self._layers = source, layers
        self._sketches = RandomProjections(source.parameters) if sketches else None
        self._half_batch = HalfBatchCosine(source) if half_batch_cosine else None
        self._clusters = ClusterNorms(layers, cluster_parts) if cluster_parts else None
        readers = (self.norms, self.probe, self._sketches, self._half_batch, self._clusters)
        self.subscribers: list[Subscriber] = [s for s in readers if s is not None]

    @torch.no_grad()
    def measure(
        self,
        sizes: Sequence[float] | None,
        *,
        are_means: bool,
        scaler: GradScaler | None,
        extra: Tensor | None,
    ) -> Tensor:
        """One vector with all sums, the same on every rank."""
        source = self._source
        with without_autocast(self._device):
            parts = {} if extra is None else {"extra": extra}
            parts |= self._parts(sizes or (), scaler, failed=sizes is None)
            if self._sketches is None:
                return self._all_reduce(parts)
            group_sizes = self._group_sizes(sizes or ())
            n = self._vector([size for size in group_sizes if size])
            means = self._sketches.stack()[: len(group_sizes)]
            if not all(group_sizes):
                means = means[[d for d, size in enumerate(group_sizes) if size]]
            means = means.to(n) if are_means else means / n[:, None]
            parts["weighted_sum"] = n @ means
            parts["spread"] = (n @ means.square().sum(1)).view(1)
            packed = self._all_reduce(parts)
            totals = unpack(packed, self.lengths)
            count, samples = totals["counted"].view(-1, source.ranks)[:2].sum(1)
            x = leave_one_out(means, n, totals["weighted_sum"], totals["spread"][0], count, samples)
            sums = torch.stack([x.sum(), x.square().sum()])
            source.reducer.all_reduce(sums)
            self.lengths["leave_one_out"] = 2
            return torch.cat([packed, sums])

    @torch.no_grad()
    def measure_grad(self, extra: Tensor | None) -> Tensor:
        """As `GradientMeter.measure` in a step that is not due."""
        grads = self._source.local_grads()
        of_grads = torch._foreach_norm(grads) if grads else [torch.zeros((), device=self._device)]
        total = stacked(of_grads).sum(0, keepdim=True, dtype=widest_float(self._device))
        parts = [] if extra is None else [extra]
        if self._source.group_tap is not None:
            parts.append(self._group_error(total))
        totals = torch.cat([to_device(part, self._device) for part in (*parts, total)])
        self._source.reducer.all_reduce(totals)
        return totals

    def _grad_sqnorms(self) -> Tensor:
        """|.grad|^2 of this rank's shards, by layer (1, L)."""
        source, parameters = self._source, list[Tensor]()
        if not self._layers:
            grads = source.local_grads()
        else:
            found = ((p, source.local_grad(p)) for p in source.parameters)
            existing = {p: grad for p, grad in found if grad is not None}
            parameters, grads = [*existing], [*existing.values()]
        squares = [squared_norms(grads)] if grads else []
        return to_device(sum_by_layer(squares, parameters, self._layers), self._device)[None]

    @property
    def _device(self) -> torch.device:
        return self._source.parameters[0].device

    def _vector(self, values: Sequence[float]) -> Tensor:
        """Numbers that the host knows, on the device."""
        dtype = widest_float(self._device)
        return to_device(torch.tensor(values, dtype=dtype, device="cpu"), self._device)

    def _parts(
        self, sizes: Sequence[float], scaler: GradScaler | None, *, failed: bool
    ) -> dict[str, Tensor]:
        """This rank's share of every sum; k = 0 if it has no micro-batch."""
        source, k, device = self._source, len(sizes), self._device
        rank, ranks, layers = source.rank, source.ranks, count_layers(self._layers)
        inverse_sizes, groups = [1 / n for n in sizes], self._group_sizes(sizes)
        of_ranks = [0.0] * (_COUNTED * ranks)
        of_ranks[rank::ranks] = [sum(map(bool, groups)), math.fsum(sizes), failed]
        numbers = [*inverse_sizes, *([1.0] * k), *range(1, k + 1)]
        known = self._vector([*numbers, 1 / ranks, math.fsum(inverse_sizes), *of_ranks])
        factors, scale, inverse_sum, counted = known.tensor_split((3 * k, 3 * k + 1, 3 * k + 2))
        sqnorms = self.norms.squares(device)[:k]  # (k, L)
        by_micro_batch = sqnorms[:, 0] if layers == 1 else sqnorms.sum(1)
        sums = torch.cat([factors.view(3, k) @ sqnorms, self._grad_sqnorms()])
        over_sizes, totals, _, grad_sqnorms = sums.unbind()
        # x - x is nan for the first one that is not finite, and nan is the largest
        first = 1 + (by_micro_batch - by_micro_batch).argmax()[None] if k > 1 else scale.new_ones(1)
        measured = torch.cat([sums[1:].sum(1), first])
        if ranks > 1:  # by value, among zeros for the other ranks
            measured = functional.pad(measured[:, None], (rank, ranks - 1 - rank)).flatten()
        for norms in source.group_norms:
            if norms is not None:
                over_sizes = over_sizes + norms.scatter(layers, device)
        projections, of_grad = self.probe.projections(with_grad=True).tensor_split([-1])
        parts = {
            "sqnorms_over_sizes": over_sizes,
            "sqnorms": totals,
            "grad_sqnorms": grad_sqnorms,
            "inverse_sizes": inverse_sum,
            "counted": counted,
            "measured": measured,
            "micro_batch_projections": projections.sum(0),
            "grad_projections": of_grad[0],
            "projection_sqnorm": projections.square().sum()[None],
            "scale": scale if scaler is None else scaler.scale(scale),
        }
        if ranks > 1 or len(set(sizes)) > 1:
            parts["slope"] = self._slope(sizes, by_micro_batch)
        if source.group_tap is not None:
            parts["group_error"] = self._group_error(scale)
        if self._half_batch is not None:
            parts["half_batch"] = self._half_batch.dots()
        if self._clusters is not None:
            parts |= self._cluster_parts(self._clusters, sizes)
        if (stages := source.reducer.stages) > 1:
            alike = parts.keys() & {"inverse_sizes", "counted", "scale"}
            parts |= {name: parts[name] / stages for name in alike}
            parts["measured"][-ranks:] = 0  # each stage has a first one that is not finite
        replicas = source.reducer.replicas
        if replicas > 1:
            of_replicas = parts.keys() & {"grad_sqnorms", "grad_projections", "half_batch"}
            parts |= {name: parts[name] / replicas for name in of_replicas}
        return parts

    def _cluster_parts(self, clusters: ClusterNorms, sizes: Sequence[float]) -> dict[str, Tensor]:
        """Sums over this rank's clusters: |H_c|^2 / n_c by layer; their number, and n_c^2."""
        m = clusters.parts
        n = [math.fsum(sizes[d : d + m]) for d in range(0, len(sizes), m)]
        numbers = [*(1 / size for size in n), len(n), math.fsum(size**2 for size in n)]
        inverse_sizes, counts = self._vector(numbers).tensor_split([len(n)])
        squares = clusters.squares(self._device)[: len(n)]
        return {"cluster_sqnorms_over_sizes": inverse_sizes @ squares, "clusters": counts}

    def _group_error(self, like: Tensor) -> Tensor:
        """The largest relative error of a sum of groups in the step, (1,)."""
        found = [norms.relative_error(like) for norms in self._source.group_norms if norms]
        errors = [error for error in found if error is not None]
        return torch.stack(errors).max()[None] if errors else like.new_zeros(1)

    def _group_sizes(self, sizes: Sequence[float]) -> list[float]:
        """n_d of every group of the step that counts; a micro-batch without groups is one."""
        pairs = zip(sizes, self._source.group_norms, strict=True) if sizes else ()
        groups = [norms.weights if norms is not None else (size,) for size, norms in pairs]
        return [*itertools.chain.from_iterable(groups)]

    def _slope(self, sizes: Sequence[float], sqnorms: Tensor) -> Tensor:
        """Covariance and variance sums of ln |h_d|^2 over ln n_d, without gradients of zero."""
        if len(set(sizes)) < 2:
            return sqnorms.new_zeros(2)
        n, tiny = self._vector(sizes), torch.finfo(sqnorms.dtype).tiny
        counts = (sqnorms > tiny).to(n.dtype)
        mean = (counts @ n.log()) / counts.sum().clamp_min(1)
        deviation = (n.log() - mean) * counts
        return torch.stack([deviation @ sqnorms.clamp_min(tiny).log(), deviation @ deviation])

    def _all_reduce(self, parts: Mapping[str, Tensor]) -> Tensor:
        self.lengths = dict(zip(parts, map(Tensor.numel, parts.values()), strict=True))
        packed = torch.cat([*parts.values()])
        self._source.reducer.all_reduce(packed)
        return packed


class RankTotals(NamedTuple):
    """The totals of the ranks, (W,) each."""

    micro_batches: Array
    samples: Array  # k and N of a rank
    failed: Array  # 1 where a rank could not take part
    sqnorm_sum: Array  # sum |h_d|^2
    numbered_sqnorm_sum: Array  # sum (d + 1) |h_d|^2; differs if micro-batches swap places
    grad_sqnorm: Array  # |.grad|^2 of a rank's shards
    first_nonfinite: Array  # number of the first micro-batch that is not finite, from 1


class StepTotals:
    """The totals of a step on the host; GradientError if a rank could not read its step."""

    def __init__(self, parts: Mapping[str, list[float]]) -> None:
        self.sqnorms_over_sizes = parts["sqnorms_over_sizes"]  # sum |h_d|^2 / n_d, by layer
        # sum |H_c|^2 / n_c, by layer; the number of clusters, and sum n_c^2
        self.cluster_sqnorms_over_sizes = parts.get("cluster_sqnorms_over_sizes", [])
        self.clusters = parts.get("clusters", [0.0, 0.0])
        self.sqnorms = parts["sqnorms"]  # sum |h_d|^2, by layer
        self.grad_sqnorms = parts["grad_sqnorms"]  # |.grad|^2, by layer
        self.is_finite = all(map(math.isfinite, [*self.sqnorms, *self.grad_sqnorms]))
        # of ln |h_d|^2 over ln n_d: covariance, variance
        self.slope = parts.get("slope", [0.0, 0.0])
        (self.inverse_sizes,) = parts["inverse_sizes"]  # sum 1 / n_d
        (self.scale,) = parts["scale"]  # of a GradScaler
        (self.group_error,) = parts.get("group_error", [0.0])  # of gradients to sums of groups
        self.leave_one_out = parts.get("leave_one_out", [math.nan] * 2)  # sums of x_d and x_d^2
        self._half_batch = parts.get("half_batch")  # |Z|^2 and .grad . Z
        self._micro_batch_projections = parts["micro_batch_projections"]
        self._grad_projections = parts["grad_projections"]
        (self._projection_sqnorm,) = parts["projection_sqnorm"]
        rows = [*parts["counted"], *parts["measured"]]
        self.ranks = RankTotals(*numpy.array(rows).reshape(len(RankTotals._fields), -1))
        if failed_ranks := self.ranks.failed.nonzero()[0].tolist():
            names = ", ".join(map(str, failed_ranks))
            raise GradientError(f"rank {names} could not read its step: see its error")
        self.micro_batches = round(self.ranks.micro_batches.sum())
        self.samples = math.fsum(self.ranks.samples.tolist())

    def half_batch_cosine(self, c: float) -> float | None:
        """SimiGrad's own cosine if it was measured; c is `reduction`."""
        if self._half_batch is None:
            return None
        signed_sqnorm, dot = self._half_batch
        return cosine_of_halves(math.fsum(self.grad_sqnorms) / c**2, signed_sqnorm, dot / c)

    def reduction(self, eps: float, replicated: bool, *, scheduled: bool = False) -> float:
        """c with `.grad` = c * (sum of h_d over all ranks): 1/W for a mean over ranks, 1 for a sum.

        The schedule of a pipeline may have divided by the micro-batches of a rank too.

        Raises:
            GradientError: `.grad` is neither, or differs between ranks that should hold the same.
        """
        ranks, grad_sqnorms = len(self.ranks.samples), self.ranks.grad_sqnorm
        largest = float(grad_sqnorms.max())
        if replicated and largest - float(grad_sqnorms.min()) > _REPLICA_TOLERANCE * largest:
            found = ", ".join(f"{sqnorm:.6g}" for sqnorm in grad_sqnorms)
            raise GradientError(
                f".grad differs between ranks (squared norms {found}): the last backward of the "
                "step ran under no_sync, or not on the DDP model's own output"
            )
        expected, actual = self._micro_batch_projections, self._grad_projections
        factors = [1 / ranks, 1.0]
        if scheduled:
            factors += [c / float(self.ranks.micro_batches.max()) for c in factors]
        errors = {c: math.dist(actual, [c * x for x in expected]) for c in factors}
        c = min(errors, key=lambda c: errors[c])
        roundings = 1 + math.sqrt(self.ranks.micro_batches.max())
        tolerance = max(_ONE_PROCESS_TOLERANCE, eps * roundings)
        if ranks > 1:
            tolerance = max(tolerance, _BFLOAT16_ROUNDING * (1 + math.sqrt(ranks)))
        length = math.hypot(*expected) + math.sqrt(self._projection_sqnorm)
        if errors[c] > tolerance * c * length:
            raise GradientError(
                f".grad is not the sum of the {self.micro_batches} micro-batch gradients that were "
                f"seen, nor their mean over {ranks} ranks: projected on one direction, it is "
                f"{actual[0]:.3g} and they are {expected[0]:.3g}; read before unscale_, "
                "clipping and step(), let every backward be seen, compress nothing, and step no "
                "optimizer inside a backward"
            )
        return c


def unpack(values: Vector, lengths: Mapping[str, int]) -> dict[str, Vector]:
    """The parts of a packed vector, on the device or after the host has read it."""
    ends = itertools.accumulate(lengths.values())
    pairs = zip(lengths.items(), ends, strict=True)
    return {name: values[end - length : end] for (name, length), end in pairs}
