"""Reads the gradient noise of a step from micro-batches that its backwards are cut into."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.advisor.forward_watch import ModuleCall, tensors_in
from bigbatch.advisor.found_training import FoundTraining
from bigbatch.advisor.loss_tape import LossTape
from bigbatch.advisor.step_reader import UNSEEN, StepReader, usable
from bigbatch.advisor.time_probe import repeatable, resized
from bigbatch.errors import GradientError
from bigbatch.gradients.dtypes import full_precision, sum_dtype, widest_float
from bigbatch.gradients.groups.coupling import running_roots
from bigbatch.gradients.groups.grouping import Grouping
from bigbatch.statistics.noise_scale import GradientStatistics, from_weighted_losses

_LEAST = 16  # samples of a micro-batch, over which BatchNorm normalizes


class CutBatchReader(StepReader):
    """Compares micro-batches of each backward, where its groups cannot be seen.

    A copy of the model repeats the forward on each micro-batch, and the functions that the program
    has called since make the loss of it. So BatchNorm normalizes over the micro-batch, and dropout
    draws other numbers. Gradients come from `autograd.grad`; random states are restored.
    """

    def _prepare(self) -> None:
        self._forwards.after_forward = self._record
        self._tapes: list[tuple[ModuleCall, LossTape]] = []  # of the backwards of the step
        self._clear()

    @staticmethod
    def sizes(samples: int, groups: int) -> tuple[int, ...]:
        """Samples of each micro-batch of a backward: 16 or more, if that leaves two of them."""
        return Grouping(samples, min(groups, max(2, samples // _LEAST))).sizes

    @staticmethod
    def refusal(training: FoundTraining, ranks: int) -> str:
        """Why no batch of this training can be cut; empty if one may be."""
        if training.is_compiled:
            return "torch.compile hides its functions"
        if training.wrapper == "FSDP2":
            return "under fully_shard a copy of the model has no weights"
        is_joined = any(isinstance(m, nn.SyncBatchNorm) for m in training.model.modules())
        return "SyncBatchNorm needs all ranks" if ranks > 1 and is_joined else ""

    def start(self, number: int, shared: Sequence[float], *, due: bool) -> None:
        """A step starts."""
        self._clear()
        super().start(number, shared, due=due)

    def close(self) -> None:
        """Removes every hook."""
        self._clear()
        super().close()

    def _clear(self) -> None:
        for _, tape in self._tapes:
            tape.leave()
        self._tapes.clear()
        device = self.source.parameters[0].device
        # samples, micro-batches, and sum |h_d|^2 / n_d of each parameter
        count = 2 + len(self.source.parameters)
        self._sums = torch.zeros(count, dtype=widest_float(device), device=device)
        self._totals: list[Tensor] = []  # sum h_d; empty until all backwards were cut

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for p in self.source.parameters]

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward of the program has ended."""
        call = self._forwards.last
        assert call is not None
        for _, tape in self._tapes:
            tape.leave()
        self._tapes.append((call, LossTape(tensors_in(output), call.samples)))

    def micro_batch(self, weight: float, groups: int = 1) -> None:
        """A backward starts."""
        for _, tape in self._tapes[-1:]:
            tape.is_recording, tape.roots = False, running_roots()
        super().micro_batch(weight, groups)

    def _take(self) -> None:
        if len(self._tapes) != len(self._sizes):
            raise GradientError("the program calls its modules several times before a backward")
        totals = self._zeros()
        for call, tape in self._tapes:
            self._cut(call, tape, totals)
        self._totals = totals

    def _cut(self, call: ModuleCall, tape: LossTape, totals: list[Tensor]) -> None:
        """Adds the micro-batches of one backward."""
        scaler = self._training.caller.scaler
        scale = self.ranks * (1.0 if scaler is None else scaler.get_scale())
        sizes = self.sizes(call.samples, self._limits.groups)
        for size, gradients in zip(sizes, self._gradients(call, tape, sizes), strict=True):
            self._sums[0] += size
            self._sums[1] += 1
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    part = full_precision(gradient) * (size / call.samples / scale)
                    square = part.to(self._sums).square().sum()
                    self._sums[2 + number] += square / size
                    totals[number] += part

    def _gradients(
        self, call: ModuleCall, tape: LossTape, sizes: Sequence[int]
    ) -> Iterator[Sequence[Tensor | None]]:
        """Of the loss of each micro-batch."""
        with repeatable(call, copies=True) as (again, own):
            if call.dim or self.samples_per_row != 1 or not own.keys() >= {*self.source.parameters}:
                raise GradientError("one call of the model has to have the samples in dimension 0")
            parameters = [own[p] for p in self.source.parameters]
            for size, end in zip(sizes, accumulate(sizes), strict=True):
                args, kwargs = resized(call, size, end - size)
                loss = tape.loss(tensors_in(again(*args, **kwargs)), end - size)
                yield torch.autograd.grad(loss, parameters, allow_unused=True)

    def _read(self, failure: str) -> tuple[GradientStatistics | None, str]:
        own = self._sums.new_tensor([*self._shared, float(bool(self._totals))])
        values = torch.cat([own, self._sums])
        totals = self._totals or self._zeros()
        for one in (values, *totals):
            self.source.reducer.all_reduce(one)
        numbers, count = values.tolist(), len(self._shared)
        self._shared, (complete, samples, k, *spreads) = numbers[:count], numbers[count:]
        if failure or complete < self.ranks:
            return None, failure or UNSEEN
        sqnorms = (float(total.to(self._sums).square().sum()) for total in totals)
        rows = [*zip(spreads, sqnorms, strict=True)]
        by_layer: dict[str, list[tuple[float, float]]] = {}
        for parameter, row in zip(self.source.parameters, rows, strict=True):
            by_layer.setdefault(self._meter.layers.get(parameter, "others"), []).append(row)
        eps = torch.finfo(self.source.parameters[0].dtype).eps

        def estimate(rows: Sequence[tuple[float, float]]) -> GradientStatistics:
            spread, sqnorm = map(math.fsum, zip(*rows, strict=True))
            return from_weighted_losses(spread, sqnorm, round(k), samples, eps)

        layers = {name: estimate(of_one) for name, of_one in by_layer.items()}
        return usable(replace(estimate(rows), layers=layers))
