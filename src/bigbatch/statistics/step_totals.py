"""Totals of a step over micro-batches and ranks: one vector, one all-reduce, one host read."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor
from torch.amp import GradScaler

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import stacked, to_device, widest_float, without_autocast
from bigbatch.statistics.half_batch_cosine import HalfBatchCosine, cosine_of_halves
from bigbatch.statistics.norms import (
    HALF_TYPES,
    ClusterNorms,
    MicroBatchNorms,
    count_layers,
    squared_norms,
    sum_by_layer,
)
from bigbatch.statistics.random_projection import ProjectionProbe, RandomProjections, leave_one_out

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Vector = TypeVar("Vector", Tensor, list[float])

_ONE_PROCESS_TOLERANCE = 1e-4  # relative difference of .grad and the micro-batches' sum
_BFLOAT16_ROUNDING = 2**-8  # once per rank, since engines may reduce in bfloat16
_SAMPLES_TOLERANCE = 1e-6  # relative difference of samples
_ROUNDING = 1e-6  # of all copied squared norms, below which a gradient may be rounding alone
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
        # of this rank in the last step: counts, |h_d|^2 (k), sums of squared norms by layer (3, L)
        self._of_rank: tuple[list[float], Tensor, Tensor]
        self._source, self._layers = source, layers
        self._sketches = RandomProjections(source) if sketches else None
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
            if not source.is_first:  # the first one of a rank adds what all of them have
                parts |= {name: 0 * parts[name] for name in ("weighted_sum", "spread")}
            packed = self._all_reduce(parts)
            totals = unpack(packed, self.lengths)
            count, samples = totals["counted"][:2]
            x = leave_one_out(means, n, totals["weighted_sum"], totals["spread"][0], count, samples)
            sums = torch.stack([x.sum(), x.square().sum()])
            if not source.is_first:
                sums.zero_()
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
        if not self._layers and source.processes == source.ranks:
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
        ranks, layers = source.ranks, count_layers(self._layers)
        inverse_sizes, groups = [1 / n for n in sizes], self._group_sizes(sizes)
        is_group, is_first = source.processes > ranks, source.is_first
        samples, inverse_sum_of_rank = math.fsum(sizes), math.fsum(inverse_sizes)
        counts = [sum(map(bool, groups)), samples, samples**2]
        numbers = [*inverse_sizes, *([1.0] * k), *range(1, k + 1)]
        if not is_first:  # the first one of a rank adds what all of them know
            inverse_sum_of_rank, counts = 0.0, [0.0, 0.0, 0.0]
        counts += [failed, *self.norms.half_types]
        known = self._vector([*numbers, 1 / source.processes, inverse_sum_of_rank, *counts])
        factors, scale, inverse_sum, counted = known.tensor_split((3 * k, 3 * k + 1, 3 * k + 2))
        sqnorms = self.norms.squares(device)[:k]  # (k, L)
        by_micro_batch = sqnorms[:, 0] if layers == 1 else sqnorms.sum(1)
        sums = torch.cat([factors.view(3, k) @ sqnorms, self._grad_sqnorms()])
        over_sizes, totals, _, grad_sqnorms = sums.unbind()
        self._of_rank = counts, by_micro_batch, sums[1:]
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
            "micro_batch_projections": projections.sum(0),
            "grad_projections": of_grad[0],
            "projection_sqnorm": projections.square().sum()[None],
            "scale": scale if scaler is None else scaler.scale(scale),
        }
        if ranks > 1:
            of_rank = grad_sqnorms.sum(0, keepdim=True)
            if is_group:
                source.reducer.sum_slices(of_rank)
            parts["grad_fourth_powers"] = of_rank.square() * is_first
        if ranks > 1 or len(set(sizes)) > 1:
            parts["slope"] = self._slope(sizes, by_micro_batch)
        if is_group:
            parts["copies"] = self._copies(scale)
        if source.group_tap is not None:
            parts["group_error"] = self._group_error(scale)
        if self._half_batch is not None:
            parts["half_batch"] = self._half_batch.dots()
        if self._clusters is not None:
            parts |= self._cluster_parts(self._clusters, sizes)
        replicas = source.reducer.replicas
        if replicas > 1:
            of_replicas = parts.keys() & {"grad_sqnorms", "grad_projections", "half_batch"}
            parts |= {name: parts[name] / replicas for name in of_replicas}
        return parts

    def gather_ranks(self) -> "RankTotals":
        """The totals of each rank in the step that was measured last. Collective; waits."""
        (micro_batches, samples, _, failed, *_), sqnorms, sums = self._of_rank
        source = self._source
        # x - x is nan for the first one that is not finite, and nan is the largest
        first = 1 + (sqnorms - sqnorms).argmax().item() if len(sqnorms) else 1
        if source.processes > source.ranks:  # a rank's processes may not have the same number
            first = 0
        of_rank = micro_batches, samples, failed, *sums.sum(1).tolist(), first
        slots = sums.new_zeros(source.ranks, len(of_rank))
        slots[source.rank] = self._vector(of_rank)
        source.reducer.all_reduce(slots)
        return RankTotals(*numpy.array(slots.tolist()).T)

    def _copies(self, like: Tensor) -> Tensor:
        """s_0 - s_i summed over i, and the sum of s_i, of each copied gradient, (2, C) flattened.

        s_i is its |.grad|^2 on process i of a tensor-parallel group.
        """
        source, copies = self._source, self._source.copied_grads()
        norms = [like.new_zeros(()) if g is None else squared_norms([g])[0] for g in copies]
        if not norms:
            return like.new_zeros(0)
        others = source.processes // source.ranks - 1
        squares = to_device(stacked(norms), self._device, like.dtype)
        return torch.cat([squares * (others if source.is_first else -1), squares])

    def _cluster_parts(self, clusters: ClusterNorms, sizes: Sequence[float]) -> dict[str, Tensor]:
        """Sums over this rank's clusters: |H_c|^2 / n_c by layer; their number, and n_c^2."""
        m = clusters.parts
        n = [math.fsum(sizes[d : d + m]) for d in range(0, len(sizes), m)]
        numbers = [*(1 / size for size in n), len(n), math.fsum(size**2 for size in n)]
        inverse_sizes, counts = self._vector(numbers).tensor_split([len(n)])
        squares = clusters.squares(self._device)[: len(n)]
        counts = counts * self._source.is_first
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


# [Note: Totals of many ranks]
# What ranks send in a step does not grow with their number: sums, and sums of squares, which say
# how much the numbers of ranks can differ:  (max - min)^2 <= 2 (sum x^2 - (sum x)^2 / W).
# Where that is too much, a rank has failed, or a fault has to be named, the totals of each rank are
# gathered (`StepTotals.of_ranks`). All ranks have the same sums, so all of them gather, or none.
class StepTotals:
    """The totals of a step over all ranks, on the host.

    Args:
        parts: the sums, by name.
        ranks: W.
        gather: returns the totals of each rank; collective.
    Raises:
        GradientError: a rank could not read its step.
    """

    def __init__(
        self, parts: Mapping[str, list[float]], ranks: int, gather: Callable[[], RankTotals]
    ) -> None:
        self.ranks, self._gather = ranks, gather
        self._of_ranks: RankTotals | None = None
        self.sqnorms_over_sizes = parts["sqnorms_over_sizes"]  # sum |h_d|^2 / n_d, by layer
        # sum |H_c|^2 / n_c, by layer; the number of clusters, and sum n_c^2
        self.cluster_sqnorms_over_sizes = parts.get("cluster_sqnorms_over_sizes", [])
        self.clusters = parts.get("clusters", [0.0, 0.0])
        self.sqnorms = parts["sqnorms"]  # sum |h_d|^2, by layer
        self.grad_sqnorms = parts["grad_sqnorms"]  # |.grad|^2, by layer
        self._copies = numpy.array(parts.get("copies", [])).reshape(2, -1)  # see `_copies`
        sqnorms = [*self.sqnorms, *self.grad_sqnorms, *self._copies.flat]
        self.is_finite = all(map(math.isfinite, sqnorms))
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
        (self._grad_fourth_powers,) = parts.get("grad_fourth_powers", [0.0])  # of the ranks
        micro_batches, self.samples, self._squared_samples, failed, *halves = parts["counted"]
        self.micro_batches = round(micro_batches)
        # relative rounding of the coarsest type among the gradients of all processes, which may
        # have other types: stages of a pipeline, ranks without a micro-batch
        used = [dtype for dtype, count in zip(HALF_TYPES, halves, strict=True) if count]
        self.eps = torch.finfo(used[0] if used else torch.float32).eps
        if failed:
            names = ", ".join(map(str, self.of_ranks.failed.nonzero()[0].tolist()))
            raise GradientError(f"rank {names} could not read its step: see its error")

    @property
    def of_ranks(self) -> RankTotals:
        """The totals of each rank. Collective where it is first read; waits for the device."""
        if self._of_ranks is None:
            self._of_ranks = self._gather()
        return self._of_ranks

    def may_differ(self, total: float, squares: float, tolerance: float) -> bool:
        """Whether numbers of the ranks with this sum may differ by so much of their mean."""
        # `*` overflows to inf; [Note: Totals of many ranks]
        squared_range = 2 * abs(self.ranks * squares - total * total) / self.ranks
        return self.ranks > 1 and not math.sqrt(squared_range) <= tolerance * total / self.ranks

    def unequal_samples(self) -> list[float]:
        """N of each rank, if the ranks have unequal numbers; else nothing."""
        if not self.may_differ(self.samples, self._squared_samples, _SAMPLES_TOLERANCE):
            return []
        samples = self.of_ranks.samples.tolist()
        is_equal = max(samples) - min(samples) <= _SAMPLES_TOLERANCE * max(samples)
        return [] if is_equal else samples

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
        ranks = self.ranks
        if replicated and self.may_differ(
            ranks * math.fsum(self.grad_sqnorms), self._grad_fourth_powers, _REPLICA_TOLERANCE
        ):
            grad_sqnorms = self.of_ranks.grad_sqnorm
            largest = float(grad_sqnorms.max())
            if largest - float(grad_sqnorms.min()) > _REPLICA_TOLERANCE * largest:
                found = ", ".join(f"{sqnorm:.6g}" for sqnorm in grad_sqnorms)
                raise GradientError(
                    f".grad differs between ranks (squared norms {found}): the last backward of "
                    "the step ran under no_sync, or not on the DDP model's own output"
                )
        differences, copies = self._copies
        allowed = _REPLICA_TOLERANCE * copies + _ROUNDING * copies.sum()
        if number := (abs(differences) > allowed).sum():
            raise GradientError(
                f"the gradients of {number} parameters differ between the processes of a "
                "tensor-parallel group, which each have a copy of them: their module sees a part "
                "of the sequence, outside the plan of parallelize_module; put it into the plan "
                "(SequenceParallel)"
            )
        expected, actual = self._micro_batch_projections, self._grad_projections
        factors = [1 / ranks, 1.0]
        if scheduled:
            factors += [c * ranks / self.micro_batches for c in factors]
        errors = {c: math.dist(actual, [c * x for x in expected]) for c in factors}
        c = min(errors, key=lambda c: errors[c])
        length = math.hypot(*expected) + math.sqrt(self._projection_sqnorm)

        def is_off(micro_batches: float) -> bool:  # more than a rank of so many may round
            return errors[c] > self._tolerance(eps, micro_batches) * c * length

        # the mean allows less than the largest does
        if is_off(self.micro_batches / ranks) and is_off(self.of_ranks.micro_batches.max()):
            counts = self.of_ranks.micro_batches.tolist()
            if scheduled and len(set(counts)) > 1:
                raise GradientError(
                    f"the ranks had {', '.join(f'{k:.0f}' for k in counts)} micro-batches, and the "
                    "schedule of each pipeline divides by its own; give every rank as many"
                )
            raise GradientError(
                f".grad is not the sum of the {self.micro_batches} micro-batch gradients that were "
                f"seen, nor their mean over {ranks} ranks: projected on one direction, it is "
                f"{actual[0]:.3g} and they are {expected[0]:.3g}; read before unscale_, "
                "clipping and step(), let every backward be seen, compress nothing, and step no "
                "optimizer inside a backward"
            )
        return c

    def _tolerance(self, eps: float, micro_batches: float) -> float:
        """Relative error of `.grad` by rounding, of a rank with so many micro-batches."""
        tolerance = max(_ONE_PROCESS_TOLERANCE, eps * (1 + math.sqrt(micro_batches)))
        if self.ranks > 1:
            tolerance = max(tolerance, _BFLOAT16_ROUNDING * (1 + math.sqrt(self.ranks)))
        return tolerance


def unpack(values: Vector, lengths: Mapping[str, int]) -> dict[str, Vector]:
    """The parts of a packed vector, on the device or after the host has read it."""
    ends = itertools.accumulate(lengths.values())
    pairs = zip(lengths.items(), ends, strict=True)
    return {name: values[end - length : end] for (name, length), end in pairs}
