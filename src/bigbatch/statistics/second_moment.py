"""Per-element sum and centred second moment of the micro-batch gradients."""

import operator
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import FULL_PRECISION, sum_dtype
from bigbatch.gradients.groups.group_tap import GroupGradients
from bigbatch.gradients.protocols import MicroBatchGradients, Subscriber
from bigbatch.gradients.source import TWICE
from bigbatch.kernels import native

_CHUNK = 1 << 23  # elements of the deviations that are in memory at a time, 32 MB in float32
_KERNEL = -1  # in the place of a chunk's number: a kernel keeps no deviations
_LIKE = operator.attrgetter("shape", "device", "dtype")
_WELFORD = native.Rule.WELFORD
_LISTS = 64  # lists of parameters that are remembered between steps

SumsOf = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""S of parameters, as a source keeps it; None where no micro-batch reached one."""


@dataclass(eq=False)
class _Block:
    """Parameters whose gradients come together, of one device and dtype, and their moments."""

    parameters: list[Tensor]
    m2s: list[Tensor]  # M2 of each, shaped like the gradients
    fits: bool  # whether kernels can read M2
    weight: float = 0.0  # of the micro-batches that they cover; 0 if no gradient came yet
    written: bool = False  # whether M2 was written to in the step; it counts as 0 before
    totals: list[Tensor] | None = None  # S of each, if the source does not keep it
    total_addresses: "array[int] | None" = None  # of S in this step, if kernels can read it

    def __post_init__(self) -> None:
        self.lengths, self.addresses = native.lengths(self.m2s), native.addresses(self.m2s)
        self.ids = list(map(id, self.parameters))
        self.strides = list(map(Tensor.stride, self.m2s))

    def arrange(self, values: list[Tensor]) -> list[Tensor]:
        """The values with the strides of M2, so that all have the same order in memory."""
        if list(map(Tensor.stride, values)) == self.strides:
            return values
        return [
            value
            if value.stride() == m2.stride() or (value.is_contiguous() and m2.is_contiguous())
            else torch.empty_like(m2, dtype=value.dtype).copy_(value)
            for value, m2 in zip(values, self.m2s, strict=True)
        ]

    def zeroed(self) -> list[Tensor]:
        """M2, which is set to 0 if the step has not written to it yet."""
        if not self.written:
            torch._foreach_zero_(self.m2s)
            self.written = True
        return self.m2s

    def catch_up(self, totals: list[Tensor], weight: float) -> None:
        """Adds zero gradients for micro-batches since the last one that reached the parameters."""
        m2s = self.zeroed()
        if self.weight < weight:
            share = (weight - self.weight) / (self.weight * weight)
            torch._foreach_addcmul_(m2s, totals, totals, share)
            self.weight = weight

    def split(self) -> Iterator["_Block"]:
        for number, (parameter, m2) in enumerate(zip(self.parameters, self.m2s, strict=True)):
            own = None if self.totals is None else [self.totals[number]]
            yield _Block([parameter], [m2], self.fits, self.weight, self.written, own)


_Placed = list[tuple[_Block, list[int]]]
"""Blocks, and where their parameters stand in a list that the source has passed."""


class GradientMoments(Subscriber):
    """Subscriber of a source: sum and centred second moment of the micro-batch gradients.

    Per element, with S and W before micro-batch d (Welford, weighted):

        M2 += n_d W / (W + n_d) (g_d - S / W)^2;   S += n_d g_d;   W += n_d

    A micro-batch that does not reach a parameter has a gradient of 0 there, and counts as such.
    M2 and S are float32 at least. S is the source's, or, where that keeps none or one of a half
    type, in a buffer of its own. The second gradient of a step writes M2, so nothing is zeroed.
    Where a micro-batch reaches only a part of a list, the rest of the step is read one by one.

    Source:
        Welford 1962, West 1979; why not E[g^2] - E[g]^2: docs/theory.md (5).
    """

    needs_exact_groups = True
    reads_at_once = True

    def __init__(self, watched: Collection[Tensor] | None = None, *, fused: bool = True) -> None:
        self.micro_batches = 0  # groups of one backward count as micro-batches
        self.weight = 0.0  # of all micro-batches, the current one included
        self._watched = watched
        self._watched_count = 0
        self._fused = fused
        self._weight_before = 0.0  # weight of the complete micro-batches
        # by the number of watched parameters and the ids of those in the list: shape, device and
        # dtype of the gradients, and their blocks
        self._lists: dict[tuple[int, ...], tuple[list[tuple[Any, ...]], _Placed]] = {}
        # arrays by id of the parameter; without meaning between steps
        self._m2s: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}  # S, if the source does not keep it
        self._block_of: dict[int, _Block] = {}  # of the parameters that this step reached

    def begin(self) -> None:
        """A step starts."""
        self.micro_batches = 0
        self.weight = self._weight_before = 0.0
        self._block_of.clear()
        self._watched_count = len(self._watched or ())
        if len(self._lists) > _LISTS:
            self._lists.clear()

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A micro-batch of n_d = weight starts."""
        self.micro_batches += groups
        self._weight_before = self.weight
        self.weight += weight

    def gradients(self, batch: MicroBatchGradients) -> None:
        """Adds n_d g_d of each parameter, which the micro-batch is about to add to S."""
        for block, places in self._blocks(batch.parameters, batch.gradients):
            if block.weight == self.weight:
                raise GradientError(TWICE)
            gradients = block.arrange(list(map(batch.gradients.__getitem__, places)))
            if not block.weight:
                keeps_none = batch.sums is None and not batch.first
                self._start(block, gradients, keeps_none=keeps_none)
            else:
                sums = None if batch.sums is None else list(map(batch.sums.__getitem__, places))
                may_sum = batch.may_sum and len(places) == len(batch.parameters)
                batch.summed |= self._add(block, gradients, sums, may_sum=may_sum)
            block.weight = self.weight

    @torch.no_grad()
    def groups(self, parameter: Tensor, gradient: Tensor, groups: GroupGradients) -> None:
        """Adds sum_d n_d (g_d - g)^2 to M2, with n_d g_d = h_d and (sum n_d) g = sum h_d."""
        block = self._block_of.get(id(parameter))
        if block is None or block.weight != self.weight:  # not watched
            return
        block.zeroed()
        m2, total = self._m2s[id(parameter)], sum(groups.weights)
        mean = gradient.to(groups.gradients.dtype)
        for images, weight in zip(groups.gradients, groups.weights, strict=True):
            if weight:
                deviation = torch.sub(images, mean, alpha=weight / total)
                scale = (self.weight - self._weight_before) / total
                m2.addcmul_(deviation, deviation, value=1 / (weight * scale))

    def are_reached(self, parameters: Iterable[Tensor]) -> list[bool]:
        """Whether a micro-batch of the step reached each of the parameters."""
        return list(map(self._block_of.__contains__, map(id, parameters)))

    @torch.no_grad()
    def sums_and_m2s(
        self, parameters: Sequence[Tensor], sums_of: SumsOf, like: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(S, M2) of each parameter over the step; zeros like `like` where nothing reached it."""
        ids = list(map(id, parameters))
        blocks = list(map(self._block_of.get, ids))
        for reached in filter(None, set(blocks)):
            if reached.weight < self.weight or not reached.written:
                totals: Any = reached.totals or sums_of(reached.parameters)
                reached.catch_up(reached.arrange(totals), self.weight)
        sums: list[Any] = list(sums_of(parameters))
        m2s: list[Any] = list(map(self._m2s.get, ids))
        for number, block in enumerate(blocks):
            if block is None:
                shape = (parameters if like is None else like)[number]  # of the gradient
                dtype = sum_dtype(shape.dtype)
                sums[number] = torch.zeros_like(shape, dtype=dtype, requires_grad=False)
                m2s[number] = sums[number].clone()
            elif block.totals:
                sums[number] = self._totals[ids[number]]
        return sums, m2s

    def kernel_columns(self, parameters: Iterable[Tensor]) -> "tuple[array[int], ...] | None":
        """Lengths, and addresses of S and M2, if kernels have read all of them in the step."""
        ids, read = list(map(id, parameters)), dict[int, tuple[int, ...]]()
        for block in set(map(self._block_of.get, ids)):
            if block is None or block.total_addresses is None:
                return None
            columns = block.lengths, block.total_addresses, block.addresses
            if block.ids == ids:
                return columns
            read.update(zip(block.ids, zip(*columns, strict=True), strict=True))
        return tuple(array("q", x) for x in zip(*map(read.__getitem__, ids), strict=True))

    # blocks

    def _blocks(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> _Placed:
        ids = tuple(map(id, parameters))
        key = self._watched_count, *ids
        like, placed = self._lists.get(key, ([], []))
        if placed and all(self._block_of.get(block.ids[0]) is block for block, _ in placed):
            return placed
        if not self._block_of.keys().isdisjoint(ids):
            return self._singles(parameters, gradients)
        present = list(map(_LIKE, gradients))  # which an engine may change
        if like != present:
            placed = self._make(parameters, gradients)
            self._lists[key] = present, placed
        for block, _ in placed:
            block.weight, block.written, block.total_addresses = 0.0, False, None
            self._block_of.update(dict.fromkeys(block.ids, block))
        return placed

    def _make(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> _Placed:
        """Sorts parameters into blocks of one device and dtype, for a kernel or of a chunk."""
        places: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
        elements = 0
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if self._watched is not None and parameter not in self._watched:
                continue
            m2, dtype = self._m2s.get(id(parameter)), sum_dtype(gradient.dtype)
            if m2 is None or _LIKE(m2) != (gradient.shape, gradient.device, dtype):
                if m2 is not None:
                    self._lists.clear()  # whose blocks have the old one
                    self._totals.pop(id(parameter), None)
                m2 = self._m2s[id(parameter)] = torch.empty_like(gradient, dtype=dtype)
            fits = self._fused and gradient.dtype == m2.dtype and native.fits([m2])
            chunk = _KERNEL if fits else elements // _CHUNK
            places.setdefault((gradient.device, gradient.dtype, chunk), []).append(place)
            elements += gradient.numel()
        placed: _Placed = []
        for (_, _, chunk), some in places.items():
            own = list(map(parameters.__getitem__, some))
            m2s = list(map(self._m2s.__getitem__, map(id, own)))
            placed.append((_Block(own, m2s, chunk == _KERNEL), some))
        return placed

    def _singles(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> _Placed:
        """A block for each watched parameter of a list, some of which the step has reached."""
        singles: _Placed = []
        for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if id(parameter) not in self._block_of and not self._blocks([parameter], [gradient]):
                continue
            block = self._block_of[id(parameter)]
            if len(block.ids) > 1:
                self._block_of.update((single.ids[0], single) for single in block.split())
            singles.append((self._block_of[id(parameter)], [place]))
        return singles

    # moments of a block

    def _start(self, block: _Block, gradients: list[Tensor], *, keeps_none: bool) -> None:
        """Takes the first gradients of a step; they were 0 in the micro-batches before."""
        if self._weight_before:
            share = self._weight_before / ((self.weight - self._weight_before) * self.weight)
            torch._foreach_addcmul_(block.zeroed(), gradients, gradients, share)
        block.totals = None
        if keeps_none or gradients[0].dtype not in FULL_PRECISION:
            for number, m2 in zip(block.ids, block.m2s, strict=True):
                if number not in self._totals:
                    self._totals[number] = torch.empty_like(m2)
            block.totals = list(map(self._totals.__getitem__, block.ids))
            torch._foreach_copy_(block.totals, gradients)
        elif self._totals:
            for number in block.ids:
                self._totals.pop(number, None)

    def _add(
        self, block: _Block, gradients: list[Tensor], sums: list[Tensor] | None, *, may_sum: bool
    ) -> bool:
        """Takes further gradients of a step; returns whether it added them to the source's S."""
        stored = block.totals or sums
        assert stored is not None
        totals = block.arrange(stored)
        if block.weight < self._weight_before:
            block.catch_up(totals, self._weight_before)
        before, weight = self._weight_before, self.weight - self._weight_before
        values = weight / before, before / (weight * self.weight), float(not block.written)
        adds = block.totals is not None
        columns = self._kernel_columns(block, gradients, totals)
        if columns is None:
            _add_deviations(gradients, totals, block.m2s, *values, adds=adds)
        else:
            adds = adds or (may_sum and totals is stored)
            native.run_at(_WELFORD, columns, block.lengths, (*values, float(adds)))
            if adds:
                torch.autograd.graph.increment_version(totals)
        block.written = True
        return adds and block.totals is None

    def _kernel_columns(
        self, block: _Block, gradients: Sequence[Tensor], totals: Sequence[Tensor]
    ) -> "list[array[int]] | None":
        fits = block.fits and native.are_plain(gradients)
        if not fits or native.lengths(gradients) != block.lengths:
            return None
        total_addresses = native.addresses(totals)
        if total_addresses != block.total_addresses:
            if not native.are_plain(totals) or native.lengths(totals) != block.lengths:
                return None
            block.total_addresses = total_addresses
        return [native.addresses(gradients), total_addresses, block.addresses]


def combine_moments(
    totals: Iterable[Tensor],
    m2s: Iterable[Tensor],
    weights: Sequence[float],
    total: Tensor,
    m2: Tensor,
    *,
    fused: bool,
) -> None:
    """Writes S and M2 of the union of several groups of micro-batches to `total` and `m2`, exactly.

        S = sum S_r;   M2 = sum M2_r + sum W_r (S_r / W_r - S / W)^2

    A group of weight 0 is in S alone; without `m2s` all M2_r are 0.

    Source:
        Chan, Golub and LeVeque 1979.
    """
    total.zero_()
    m2.zero_()
    before = 0.0
    for row, weight in zip(totals, weights, strict=True):
        if weight and before:
            columns = [row.to(total.dtype)], [total], [m2]
            values = weight / before, before / (weight * (before + weight)), 0.0
            if fused and native.fits(*columns):
                native.run(native.Rule.WELFORD, columns, (*values, 1.0))
            else:
                _add_deviations(*columns, *values, adds=True)
        else:
            total.add_(row)
        before += weight
    for group_m2 in m2s:
        m2.add_(group_m2)


def _add_deviations(
    gradients: list[Tensor],
    totals: list[Tensor],
    m2s: list[Tensor],
    mean_of: float,
    share: float,
    first: float,
    *,
    adds: bool,
) -> None:
    """M2 += share (g - mean_of S)^2, from 0 if `first`; S += g if `adds`; by torch."""
    deviations = torch._foreach_sub(gradients, totals, alpha=mean_of)
    if first:
        torch._foreach_zero_(m2s)
    torch._foreach_addcmul_(m2s, deviations, deviations, share)
    if adds:
        torch._foreach_add_(totals, gradients)
