"""Signal and noise from two consecutive steps of one backward each."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import full_precision, to_device, widest_float
from bigbatch.statistics.confidence import Interval
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch.statistics.norms import squared_norms, sum_by_layer

_MAX_RATIO = 2.0  # of the sizes of two steps; the smaller one would decide alone


class ConsecutiveSteps:
    """Compares the mean gradients of two steps, where no step has micro-batches to compare.

        noise = |g_1 - g_2|^2 / (1 / n_1 + 1 / n_2),    signal = g_1 . g_2

    g_2 is the gradient at weights that g_1 has moved. What that changes counts as noise and lowers
    the signal: both estimates are biased by the length of a step, as docs/theory.md (14) derives.
    Pairs are disjoint, so that their statistics share no gradient and the interval of their average
    is right. The second step of a pair, which is compared with a copy of the first one's gradient,
    starts another pair instead if the trained parameters have changed, or one step has more than
    twice the samples of the other.

    Args:
        layers: the name of each parameter's layer, for statistics by layer; empty for none.
        confidence: coverage of an interval. Two gradients have none, so it is the whole range.
    Source:
        AdaptDL's estimate on one replica (Qiao et al., OSDI 2021); docs/theory.md (14).
    """

    def __init__(
        self, layers: Mapping[Tensor, str] | None = None, confidence: float | None = None
    ) -> None:
        self._layers, self._confidence = layers or {}, confidence
        self._names: list[str] = []  # of the layers of the last comparison
        self._sizes = (0.0, 0.0)  # n_1 and n_2 of the last comparison
        self._first: _FirstStep | None = None  # of a pair

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
            |g_1|^2, |g_2|^2 and |g_1 - g_2|^2 by layer, over the elements of the shards, (3 L,);
            None for the first step of a pair.
        """
        first, self._first = self._first, None
        if first is None or not first.matches(parameters, samples):
            existing = [full_precision(g).detach() for g in gradients if g is not None]
            copies = iter(torch._foreach_div(existing, scale) if existing else ())
            kept = [None if g is None else next(copies) for g in gradients]
            sqnorms = self._by_layer(parameters, kept)
            self._first = _FirstStep(samples, kept, sqnorms, list(parameters))
            return None
        self._sizes = first.samples, samples
        kept = [  # loaded ones may be on another device
            None if g is None else to_device(g, p.device)
            for g, p in zip(first.gradients, parameters, strict=True)
        ]
        is_scaled = isinstance(scale, Tensor) or scale != 1
        if (existing := [g for g in kept if g is not None]) and is_scaled:
            torch._foreach_mul_(existing, scale)
        pairs = list(zip(kept, gradients, strict=True))
        if both := [(g, h) for g, h in pairs if g is not None and h is not None]:
            torch._foreach_sub_([g for g, _ in both], [h for _, h in both])
        second = self._by_layer(parameters, gradients)
        difference = self._by_layer(parameters, [h if g is None else g for g, h in pairs])
        return torch.cat([first.sqnorms.to(second), second / scale**2, difference / scale**2])

    def statistics(self, values: Sequence[float]) -> GradientStatistics:
        """The statistics of the last pair, for the size of its second step, from its `add`."""
        count = len(values) // 3
        rows = [values[i::count] for i in range(count)]
        whole = _estimate([*map(math.fsum, zip(*rows, strict=True))], *self._sizes)
        named_rows = zip(self._names, rows, strict=False)
        layers = {name: _estimate(row, *self._sizes) for name, row in named_rows}
        interval = None
        if self._confidence is not None:
            interval = Interval(-math.inf, math.inf, self._confidence, "step")
        return replace(whole, layers=layers, interval=interval)

    def forget(self) -> None:
        """The next step is the first of a pair: call it after a step that was skipped."""
        self._first = None

    def state_dict(self) -> dict[str, Any] | None:
        """The first step of a pair, with a copy of its gradient; None between two pairs."""
        return None if self._first is None else self._first.state()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continues from a saved state; its gradients are those of as many parameters again."""
        self._first = None if state is None else _FirstStep(**_FirstStep(**state).state())

    def _by_layer(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        """Squared norms of the tensors, by layer, (L,), on the device of the parameters."""
        layers = {p: self._layers.get(p, "others") for p in parameters} if self._layers else {}
        self._names = list(dict.fromkeys(layers.values()))
        numbers = {p: self._names.index(name) for p, name in layers.items()}
        existing = {p: t for p, t in zip(parameters, tensors, strict=True) if t is not None}
        squares = [squared_norms([*existing.values()])] if existing else []
        device = parameters[0].device
        return to_device(sum_by_layer(squares, existing, numbers), device, widest_float(device))


@dataclass
class _FirstStep:
    samples: float  # n_1
    gradients: list[Tensor | None]  # g_1, without any scale
    sqnorms: Tensor  # |g_1|^2 by layer, (L,)
    parameters: list[Tensor] | None = None  # None once loaded

    def state(self) -> dict[str, Any]:
        gradients = [None if g is None else g.clone() for g in self.gradients]
        return {"samples": self.samples, "gradients": gradients, "sqnorms": self.sqnorms}

    def matches(self, parameters: Sequence[Tensor], samples: float) -> bool:
        if len(parameters) != len(self.gradients):
            return False
        if max(samples, self.samples) > _MAX_RATIO * min(samples, self.samples):
            return False
        return self.parameters is None or all(map(operator.is_, parameters, self.parameters))


def _estimate(sqnorms: Sequence[float], first: float, second: float) -> GradientStatistics:
    """Signal and noise of a pair; g_1 . g_2 = (|g_1|^2 + |g_2|^2 - |g_1 - g_2|^2) / 2."""
    first_sqnorm, second_sqnorm, difference_sqnorm = sqnorms
    signal = (first_sqnorm + second_sqnorm - difference_sqnorm) / 2
    noise = difference_sqnorm / (1 / first + 1 / second)
    return GradientStatistics(signal, noise, second, 2, compared="consecutive steps")
