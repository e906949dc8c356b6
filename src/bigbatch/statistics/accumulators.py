"""Sums of a step over micro-batches and ranks, on the device."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import to_device, widest_float, without_autocast
from bigbatch.statistics.confidence import left_out
from bigbatch.statistics.half_batch_cosine import HalfBatchCosine
from bigbatch.statistics.norms import MicroBatchNorms, squared_norm
from bigbatch.statistics.random_projection import ProjectionProbe, RandomProjections
from bigbatch.statistics.step_totals import FIELDS, pack, unpack


class StepAccumulators:
    """The sums of a step over micro-batches and ranks; nothing waits for the device.

    Args:
        source: the source of the gradients.
        layers: the number of each parameter's layer; empty where all are one.
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
        self.lengths: dict[str, int] = {}  # of the parts of what `measure` gives
        self._source = source
        self._probe = ProjectionProbe(source)
        self._sketches = RandomProjections(source.parameters) if sketches else None

    @property
    def subscribers(self) -> list[Subscriber]:
        """The subscribers that have to see the gradients."""
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
            sizes: n_d of this rank's micro-batches; None where this rank cannot take part.
            are_means: whether h_d is the mean gradient g_d, and not n_d times as long.
            scaler: the GradScaler of the losses.
            extra: more values to sum over the ranks; they come first.
        """
        with without_autocast(self._device):
            squares, n = self._sqnorms_and_sizes(sizes)
            parts = {} if extra is None else {"extra": extra}
            parts |= self._parts(squares, n, sizes)
            one = torch.ones((), dtype=n.dtype, device=n.device)
            parts["scale"] = (one if scaler is None else scaler.scale(one)) / self._source.ranks
            if self._sketches is None:
                return self._summed(parts)
            means = self._sketches.zero_sketch() if not sizes else self._sketches.stack()
            means = means.to(n) if are_means else means.to(n) / n[:, None]
            parts["weighted_sum"] = n @ means
            parts["spread"] = n @ means.square().sum(1)
            packed = self._summed(parts)
            x = self._left_out(packed, means, n)[: len(sizes or ())]
            sums = torch.stack([x.sum(), x.square().sum()])
            self._source.reducer.all_reduce(sums)
            self.lengths["leave_one_out"] = 2
            return torch.cat([packed, sums])

    @torch.no_grad()
    def measure_grad(self, extra: Tensor) -> Tensor:
        """[*extra, |.grad|^2], added up over the ranks."""
        squares = self.grad_sqnorms().sum() / self._source.reducer.replicas
        return self._summed({"extra": extra, "grad_sqnorms": squares})

    @torch.no_grad()
    def grad_sqnorms(self) -> Tensor:
        """|.grad|^2 of this rank's shards, by layer (L,)."""
        grads = ((p, self._source.local_grad(p)) for p in self._source.parameters)
        return self.norms.by_layer({p: squared_norm(g) for p, g in grads if g is not None})

    @property
    def _device(self) -> torch.device:
        return self._source.parameters[0].device

    def _sqnorms_and_sizes(self, sizes: Sequence[float] | None) -> tuple[Tensor, Tensor]:
        """|h_d|^2 by layer (k, L), and n_d (k,); one of zeros where this rank has none."""
        dtype = widest_float(self._device)
        if not sizes:
            none = torch.zeros(1, self.norms.count, dtype=dtype, device=self._device)
            return none, torch.ones(1, dtype=dtype, device=self._device)
        squares = [to_device(s, self._device, dtype) for s in self.norms.squares]
        return torch.stack(squares), to_device(
            torch.tensor(sizes, dtype=dtype, device="cpu"), self._device
        )

    def _parts(
        self, squares: Tensor, n: Tensor, sizes: Sequence[float] | None
    ) -> dict[str, Tensor]:
        """This rank's share of every sum."""
        source = self._source
        grad_sqnorms = to_device(self.grad_sqnorms(), n.device)
        micro_batch_sqnorms = squares.sum(1)
        parts = {
            "sqnorms_over_sizes": (squares / n[:, None]).sum(0),
            "sqnorms": squares.sum(0),
            "grad_sqnorms": grad_sqnorms / source.reducer.replicas,
            "inverse_sizes": (1 / n).sum() * bool(sizes),
            "slope": _slope(n, micro_batch_sqnorms),
            "micro_batch_projections": self._probe.micro_batch_projections,
            "grad_projections": self._probe.grad_projections() / source.reducer.replicas,
            "projection_sqnorm": self._probe.squares,
            "ranks": self._slots(n, micro_batch_sqnorms, grad_sqnorms.sum(), sizes),
        }
        if self.half_batch_cosine is not None:
            parts["half_batch"] = self.half_batch_cosine.dots() / source.reducer.replicas
        return parts

    def _slots(
        self,
        n: Tensor,
        micro_batch_sqnorms: Tensor,
        grad_sqnorm: Tensor,
        sizes: Sequence[float] | None,
    ) -> Tensor:
        """A place for every rank (`OfRank`), of which this one fills its own."""
        k = len(micro_batch_sqnorms)
        numbers = torch.arange(1, k + 1, device=n.device)
        first_bad = torch.where(micro_batch_sqnorms.isfinite(), k + 1, numbers).amin()
        rank_values = [
            torch.full_like(n[0], len(sizes or ())),
            n.sum() * bool(sizes),
            torch.full_like(n[0], sizes is None),
            micro_batch_sqnorms.sum(),
            (numbers * micro_batch_sqnorms).sum(),
            torch.where(first_bad > k, 0, first_bad).to(n.dtype),
            grad_sqnorm,
        ]
        slots = n.new_zeros(self._source.ranks, FIELDS)
        slots[self._source.rank] = torch.stack(rank_values)
        return slots

    def _summed(self, parts: Mapping[str, Tensor]) -> Tensor:
        self.lengths = {name: part.numel() for name, part in parts.items()}
        packed = pack(parts)
        self._source.reducer.all_reduce(packed)
        return packed

    def _left_out(self, packed: Tensor, means: Tensor, n: Tensor) -> Tensor:
        sums = unpack(packed, self.lengths)
        count, samples = sums["ranks"].view(-1, FIELDS)[:, :2].sum(0)
        return left_out(means, n, sums["weighted_sum"], sums["spread"][0], count, samples)


def _slope(n: Tensor, squares: Tensor) -> Tensor:
    """Covariance and variance sums of ln |h_d|^2 over ln n_d, without gradients of zero."""
    tiny = torch.finfo(squares.dtype).tiny
    counts = (squares > tiny).to(n.dtype)
    mean = (counts @ n.log()) / counts.sum().clamp_min(1)
    deviation = (n.log() - mean) * counts
    return torch.stack([deviation @ squares.clamp_min(tiny).log(), deviation @ deviation])
