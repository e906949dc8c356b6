"""Sums of a step over micro-batches and ranks, on the device."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import to_device, widest_float, without_autocast
from bigbatch.statistics.confidence import leave_one_out
from bigbatch.statistics.half_batch_cosine import HalfBatchCosine
from bigbatch.statistics.norms import MicroBatchNorms, squared_norm
from bigbatch.statistics.random_projection import ProjectionProbe, RandomProjections
from bigbatch.statistics.step_totals import FIELDS, pack, unpack


class StepAccumulators:
    """The sums of a step over micro-batches and ranks; nothing waits for the device.

    Args:
        source: the source of the gradients.
        layers: the number of each parameter's layer; empty if all parameters are one layer.
        sketches: whether to accumulate the projections that an interval needs.
        half_batch_cosine: whether to accumulate SimiGrad's cosine.
    """

    def __init__(
        self,
        source: GradientSource,
        layers: Mapping[Tensor, int],
        *,
        sketches: bool,
        half_batch_cosine: bool,
    ) -> None:
        self.norms = MicroBatchNorms(layers)
        self.half_batch_cosine = HalfBatchCosine(source) if half_batch_cosine else None
        self.lengths: dict[str, int] = {}  # length of each part of the last packed vector
        self._source = source
        self._probe = ProjectionProbe(source)
        self._sketches = RandomProjections(source.parameters) if sketches else None

    @property
    def subscribers(self) -> list[Subscriber]:
        """The subscribers that read the gradients."""
        optional = [s for s in (self._sketches, self.half_batch_cosine) if s is not None]
        return [self.norms, self._probe, *optional]

    @torch.no_grad()
    def measure(
        self,
        sizes: Sequence[float] | None,
        *,
        are_means: bool,
        scaler: GradScaler | None,
        extra: Tensor | None,
    ) -> Tensor:
        """One vector with all sums, the same on every rank.

        Args:
            sizes: n_d of this rank's micro-batches; None if this rank cannot take part.
            are_means: whether h_d is the mean gradient g_d, and not n_d times as long.
            scaler: the GradScaler of the losses.
            extra: further values to sum over the ranks; they come first.
        """
        source = self._source
        with without_autocast(self._device):
            sqnorms, n = self._sqnorms_and_sizes(sizes)
            parts = {} if extra is None else {"extra": extra}
            parts |= self._parts(sqnorms, n, failed=sizes is None)
            one = n.new_ones(())
            parts["scale"] = (one if scaler is None else scaler.scale(one)) / source.ranks
            if self._sketches is None:
                return self._all_reduce(parts)
            n = n.new_tensor(self._group_sizes(sizes or ()))
            means = (self._sketches.stack() if sizes else self._sketches.zeros(0)).to(n)
            means, n = means[n > 0], n[n > 0]
            means = means if are_means else means / n[:, None]
            parts["weighted_sum"] = n @ means
            parts["spread"] = n @ means.square().sum(1)
            packed = self._all_reduce(parts)
            totals = unpack(packed, self.lengths)
            count, samples = totals["ranks"].view(-1, FIELDS)[:, :2].sum(0)
            x = leave_one_out(means, n, totals["weighted_sum"], totals["spread"][0], count, samples)
            sums = torch.stack([x.sum(), x.square().sum()])
            source.reducer.all_reduce(sums)
            self.lengths["leave_one_out"] = 2
            return torch.cat([packed, sums])

    @torch.no_grad()
    def measure_grad(self, extra: Tensor | None) -> Tensor:
        """[*extra, |.grad|^2], summed over the ranks."""
        sqnorm = self.grad_sqnorms().sum() / self._source.reducer.replicas
        parts = {} if extra is None else {"extra": extra}
        return self._all_reduce(parts | {"grad_sqnorms": sqnorm})

    @torch.no_grad()
    def grad_sqnorms(self) -> Tensor:
        """|.grad|^2 of this rank's shards, by layer (L,)."""
        grads = ((p, self._source.local_grad(p)) for p in self._source.parameters)
        return self.norms.by_layer({p: squared_norm(g) for p, g in grads if g is not None})

    @property
    def _device(self) -> torch.device:
        return self._source.parameters[0].device

    def _sqnorms_and_sizes(self, sizes: Sequence[float] | None) -> tuple[Tensor, Tensor]:
        """|h_d|^2 by layer (k, L), and n_d (k,); k = 0 if this rank has no micro-batch."""
        device, dtype = self._device, widest_float(self._device)
        n = to_device(torch.tensor(sizes or (), dtype=dtype, device="cpu"), device)
        if not sizes:
            return n.new_zeros(0, self.norms.count), n
        return torch.stack([to_device(s, device, dtype) for s in self.norms.squares]), n

    def _parts(self, sqnorms: Tensor, n: Tensor, *, failed: bool) -> dict[str, Tensor]:
        """This rank's share of every sum."""
        replicas = self._source.reducer.replicas
        grad_sqnorms = to_device(self.grad_sqnorms(), n.device)
        micro_batch_sqnorms = sqnorms.sum(1)
        grouped = [norms for norms in self._source.group_norms if norms is not None]
        within = [norms.scatter(self.norms.count, n.device) for norms in grouped]
        errors = [to_device(norms.relative_error(), n.device, n.dtype) for norms in grouped]
        parts = {
            "sqnorms_over_sizes": sum(within, (sqnorms / n[:, None]).sum(0)),
            "group_error": torch.stack([n.new_zeros(()), *errors]).max(),
            "sqnorms": sqnorms.sum(0),
            "grad_sqnorms": grad_sqnorms / replicas,
            "inverse_sizes": (1 / n).sum(),
            "slope": _slope(n, micro_batch_sqnorms),
            "micro_batch_projections": self._probe.micro_batch_projections,
            "grad_projections": self._probe.grad_projections() / replicas,
            "projection_sqnorm": self._probe.squares,
            "ranks": self._rank_rows(n, micro_batch_sqnorms, grad_sqnorms.sum(), failed=failed),
        }
        if self.half_batch_cosine is not None:
            parts["half_batch"] = self.half_batch_cosine.dots() / replicas
        return parts

    def _group_sizes(self, sizes: Sequence[float]) -> list[float]:
        """n_d of every group of the step; a micro-batch without groups is one."""
        pairs = zip(sizes, self._source.group_norms, strict=True) if sizes else ()
        return [n for size, norms in pairs for n in ((size,) if norms is None else norms.weights)]

    def _rank_rows(
        self, n: Tensor, micro_batch_sqnorms: Tensor, grad_sqnorm: Tensor, *, failed: bool
    ) -> Tensor:
        """One row of `RankTotals` per rank; zero in the rows of other ranks."""
        numbers = torch.arange(1, len(n) + 1, device=n.device)
        nonfinite_so_far = (~micro_batch_sqnorms.isfinite()).cumsum(0)
        first_nonfinite = 1 + (nonfinite_so_far == 0).sum()
        rank_totals = [
            n.new_full((), sum(size > 0 for size in self._group_sizes([1.0] * len(n)))),
            n.sum(),
            n.new_full((), failed),
            micro_batch_sqnorms.sum(),
            (numbers * micro_batch_sqnorms).sum(),
            torch.where(first_nonfinite > len(n), 0, first_nonfinite).to(n.dtype),
            grad_sqnorm,
        ]
        rows = n.new_zeros(self._source.ranks, FIELDS)
        rows[self._source.rank] = torch.stack(rank_totals)
        return rows

    def _all_reduce(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Packs the parts and sums them over the ranks."""
        self.lengths = {name: part.numel() for name, part in parts.items()}
        packed = pack(parts)
        self._source.reducer.all_reduce(packed)
        return packed


def _slope(n: Tensor, squares: Tensor) -> Tensor:
    """Covariance and variance sums of ln |h_d|^2 over ln n_d, without gradients of zero."""
    tiny = torch.finfo(squares.dtype).tiny
    counts = (squares > tiny).to(n.dtype)
    mean = (counts @ n.log()) / counts.sum().clamp_min(1)
    deviation = (n.log() - mean) * counts
    return torch.stack([deviation @ squares.clamp_min(tiny).log(), deviation @ deviation])
