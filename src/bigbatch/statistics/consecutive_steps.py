"""Signal and noise from two consecutive steps of one backward each."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import full_precision, to_device, widest_float
from bigbatch.statistics.confidence import Interval
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.statistics.norms import MicroBatchNorms

_MAX_RATIO = 2.0  # of the sizes of two steps; the smaller one would decide alone


class ConsecutiveSteps:
    """Compares the mean gradients of two steps, where no step has micro-batches to compare.

        noise = |g_1 - g_2|^2 / (1 / n_1 + 1 / n_2),    signal = g_1 . g_2

    g_2 is the gradient at weights that g_1 has moved. What that changes counts as noise and lowers
    the signal: both estimates are biased by the length of a step, as docs/theory.md (14) derives.

    Steps are compared in disjoint pairs, so that the statistics of two pairs share no gradient and
    the interval of their average is right. `add` keeps a copy of the gradient of the first step of
    a pair, and compares the second one with it. The second one starts another pair instead if the
    trained parameters have changed, or one step has more than twice the samples of the other.

    Args:
        layers: the name of each parameter's layer, for statistics by layer; empty for none.
        confidence: coverage of an interval. Two gradients have none, so it is the whole range.
    Source:
        AdaptDL's estimate on one replica (Qiao et al., OSDI 2021); docs/theory.md (14).
    Example:
        >>> pairs, weight = ConsecutiveSteps(), torch.zeros(2)
        >>> pairs.add([weight], [torch.tensor([1.0, 0.0])], samples=8) is None
        True
        >>> sums = pairs.add([weight], [torch.tensor([1.0, 2.0])], samples=8)
        >>> step = pairs.statistics(sums.tolist())
        >>> step.grad_sqnorm, step.grad_variance
        (1.0, 16.0)
    """

    def __init__(
        self, layers: Mapping[Tensor, str] | None = None, confidence: float | None = None
    ) -> None:
        self._layers, self._confidence = layers or {}, confidence
        self._names: list[str] = []  # of the layers of the last comparison
        self._sizes = (0.0, 0.0)  # n_1 and n_2 of the last comparison
        # the first step of a pair
        self._samples = 0.0  # n_1; 0 before it
        self._gradients: list[Tensor | None] = []  # g_1, without any scale
        self._sqnorms: list[Tensor] = []  # |g_1|^2 by layer, (L,)
        self._parameters: list[Tensor] | None = None  # None once loaded

    @torch.no_grad()
    def add(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        samples: float,
        scale: float | Tensor = 1.0,
    ) -> Tensor | None:
        """Adds a step; the host does not wait for the device.

        Args:
            parameters: the trained parameters.
            gradients: this rank's shard of the mean gradient of each; None where it is zero.
            samples: n, what the loss of the step is a mean over.
            scale: what the gradients are multiplied by (that of a GradScaler).
        Returns:
            Sums over the elements of the shards for `statistics`, (3 L,); None for the first step
            of a pair.
        """
        comparable = self._matches(parameters, samples)
        self._count_layers(parameters)
        if comparable:
            return self._compare(parameters, gradients, samples, scale)
        self.forget()
        kept = [None if g is None else full_precision(g).detach().clone() for g in gradients]
        if (existing := [g for g in kept if g is not None]) and _is_scaled(scale):
            torch._foreach_div_(existing, scale)
        self._samples, self._gradients, self._parameters = samples, kept, list(parameters)
        self._sqnorms = [self._by_layer(parameters, kept)]
        return None

    def statistics(self, values: Sequence[float]) -> GradientStatistics:
        """The statistics of the last pair, for the size of its second step.

        Args:
            values: the sums of `add`, over all shards, once the host has read them.
        """
        count = len(values) // 3
        rows = [values[i::count] for i in range(count)]
        whole = _estimate([math.fsum(row[i] for row in rows) for i in range(3)], *self._sizes)
        layers = {
            name: _estimate(row, *self._sizes) for name, row in zip(self._names, rows, strict=False)
        }
        interval = None
        if self._confidence is not None:
            interval = Interval(-math.inf, math.inf, self._confidence, "step")
        return replace(whole, layers=layers, interval=interval)

    def forget(self) -> None:
        """The next step is the first of a pair: call it after a step that was skipped."""
        self._samples, self._gradients, self._sqnorms = 0.0, [], []
        self._parameters = None

    def state_dict(self) -> dict[str, Any] | None:
        """The first step of a pair, with a copy of its gradient; None between two pairs."""
        if not self._samples:
            return None
        gradients = [None if g is None else g.clone() for g in self._gradients]
        return {"samples": self._samples, "gradients": gradients, "sqnorms": self._sqnorms[0]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from a saved state; its gradients are those of as many parameters again."""
        self.forget()
        if state is not None:
            self._samples = float(state["samples"])
            self._gradients = [None if g is None else g.clone() for g in state["gradients"]]
            self._sqnorms = [state["sqnorms"]]

    def _matches(self, parameters: Sequence[Tensor], samples: float) -> bool:
        """Whether a step can be compared with the one that is kept."""
        if not self._samples or len(parameters) != len(self._gradients):
            return False
        if max(samples, self._samples) > _MAX_RATIO * min(samples, self._samples):
            return False
        return self._parameters is None or all(map(operator.is_, parameters, self._parameters))

    def _compare(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        samples: float,
        scale: float | Tensor,
    ) -> Tensor:
        """|g_1|^2, |g_2|^2 and |g_1 - g_2|^2 by layer; the pair is complete."""
        first = self._sqnorms[0]
        kept = [  # loaded ones may be on another device
            None if g is None else to_device(g, p.device)
            for g, p in zip(self._gradients, parameters, strict=True)
        ]
        self._sizes = self._samples, samples
        self.forget()
        if (existing := [g for g in kept if g is not None]) and _is_scaled(scale):
            torch._foreach_mul_(existing, scale)
        pairs = zip(kept, gradients, strict=True)
        if both := [(g, h) for g, h in pairs if g is not None and h is not None]:
            torch._foreach_sub_([g for g, _ in both], [h for _, h in both])
        differences = [h if g is None else g for g, h in zip(kept, gradients, strict=True)]
        second = self._by_layer(parameters, gradients)
        difference = self._by_layer(parameters, differences)
        return torch.cat([first.to(second), second / scale**2, difference / scale**2])

    def _count_layers(self, parameters: Sequence[Tensor]) -> None:
        names = [self._layers.get(p, "others") for p in parameters] if self._layers else []
        self._names = list(dict.fromkeys(names))
        numbers = {name: number for number, name in enumerate(self._names)}
        by_parameter = {p: numbers[name] for p, name in zip(parameters, names, strict=False)}
        self._norms = MicroBatchNorms(by_parameter)

    def _by_layer(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        """Squared norms of the tensors, by layer, (L,), on the device of the parameters."""
        existing = {p: t for p, t in zip(parameters, tensors, strict=True) if t is not None}
        device = parameters[0].device
        squares = self._norms.by_layer([*existing.values()], [*existing])
        return to_device(squares, device, widest_float(device))


def _is_scaled(scale: float | Tensor) -> bool:
    return isinstance(scale, Tensor) or scale != 1


def _estimate(sqnorms: Sequence[float], first: float, second: float) -> GradientStatistics:
    """Signal and noise of a pair; g_1 . g_2 = (|g_1|^2 + |g_2|^2 - |g_1 - g_2|^2) / 2."""
    first_sqnorm, second_sqnorm, difference_sqnorm = sqnorms
    signal = (first_sqnorm + second_sqnorm - difference_sqnorm) / 2
    noise = difference_sqnorm / (1 / first + 1 / second)
    return GradientStatistics(signal, noise, second, 2, compared="consecutive steps")
