"""Sees each micro-batch's gradient once, before it is summed away."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn

from bigbatch.errors import GradientError, SettingError
from bigbatch.measure.noise import GradientNoise, from_mean_losses, from_weighted_losses
from bigbatch.measure.source import GradientSource, PlainSource


class GradientMeter:
    """Measures gradient noise in anybody's loop; one read of each micro-batch's gradient.

    Each `backward()` is one micro-batch. After the last one, and before clipping, `step()` or
    `zero_grad()`, `read` says how much they agreed.

    Args:
        model: whose parameters are measured, or an iterable of parameters.
        loss: what is called backward on. "weighted": the losses of a step sum to the mean loss
            (loss * n_d / N, the usual accumulation). "mean": each is the plain mean loss of its
            micro-batch.
    Raises:
        SettingError: an unknown `loss`, or nothing to measure.
    Source:
        docs/theory.md; the similarity is that of SimiGrad (Qin et al., NeurIPS 2021).
    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with GradientMeter(model) as meter:
        ...     for gradient in (1.0, 3.0):
        ...         (model(torch.tensor([[gradient]])).sum() / 2).backward()
        ...     noise = meter.read(samples=[8, 8])
        >>> noise.signal, noise.noise
        (3.0, 16.0)
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        *,
        loss: Literal["weighted", "mean"] = "weighted",
    ) -> None:
        if loss not in ("weighted", "mean"):
            raise SettingError(f'loss={loss!r} is unknown; choose "weighted" or "mean"')
        self.loss = loss
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self.source: GradientSource = PlainSource(parameters)
        if not any(p.requires_grad for p in self.source.parameters):
            raise SettingError("no parameter requires a gradient, so there is nothing to measure")
        self._norms = _MicroBatchNorms()
        self.source.subscribe(self._norms)

    def __enter__(self) -> "GradientMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the meter's hooks off the model."""
        self.source.close()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Makes every backward inside one micro-batch; keeps one copy of `.grad` meanwhile."""
        try:
            with self.source.micro_batch():
                self._norms.compare(self.source.parameters)
                yield
        finally:
            self._norms.compare(None)

    def read(self, samples: int | Sequence[float]) -> GradientNoise:
        """Returns the noise of the step and waits for the next one.

        Args:
            samples: n_d of each micro-batch, in the order of the backwards; or N where all are
                equal.
        Raises:
            GradientError: the sizes do not fit the backwards seen, fewer than two were seen, or
                `.grad` was touched since the last one.
        """
        self.source.require_unchanged("read()")
        sizes = self._sizes(samples)
        *squares, of_sum = self.measure().tolist()
        self.source.restart()
        estimate = from_mean_losses if self.loss == "mean" else from_weighted_losses
        return estimate(squares, of_sum, sizes, self.eps)

    @property
    def eps(self) -> float:
        """Relative rounding of the coarsest type among the gradients."""
        return max(torch.finfo(p.dtype).eps for p in self.source.parameters if p.requires_grad)

    def measure(self) -> Tensor:
        """Squared norms of what each micro-batch added to `.grad`, then of `.grad` itself.

        Returns:
            float64 tensor of k + 1 numbers on the parameters' device; nothing waits for it.
        """
        parameters = self.source.parameters
        of_sum = _total([squared_norm(p.grad) for p in parameters if p.grad is not None])
        squares = [s.to(of_sum.device, non_blocking=True) for s in self._norms.squares]
        return torch.stack([*squares, of_sum])

    def _sizes(self, samples: int | Sequence[float]) -> Sequence[float]:
        if not isinstance(samples, int | Integral):
            return samples
        k = self.source.micro_batches
        if self._norms.uneven or samples % k:
            why = "; some did not reach every parameter" if self._norms.uneven else ""
            raise GradientError(
                f"samples={samples} is not {k} equal micro-batches{why}; give the list of sizes, "
                "and mark a micro-batch of several backwards `with meter.micro_batch():`"
            )
        return [int(samples) // k] * k


class _MicroBatchNorms:
    """Subscriber of a source: |h_d|^2 of each micro-batch, h_d being what it adds to `.grad`."""

    def __init__(self) -> None:
        self.squares: list[Tensor] = []
        self.uneven = False  # whether micro-batches reached different parameters
        self._present: dict[Tensor, Tensor] = {}  # parameter -> |h|^2
        self._reached: set[Tensor] = set()  # by the first micro-batch
        self._copies: dict[Tensor, Tensor | None] | None = None  # .grad before the present one

    def compare(self, parameters: list[Tensor] | None) -> None:
        """Reads the micro-batch as a difference of `.grad`, whatever makes it up; None: no more."""
        if parameters is None:
            self._copies = None
        else:
            self._copies = {p: None if p.grad is None else p.grad.clone() for p in parameters}

    def begin(self) -> None:
        self.squares.clear()
        self.uneven = False

    def micro_batch(self, weight: float) -> None:
        self._present.clear()

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        if self._copies is not None:
            return
        if parameter in self._present:
            raise GradientError(
                "a parameter received two gradients in one micro-batch; mark the micro-batches "
                "with `with meter.micro_batch():`"
            )
        self._present[parameter] = squared_norm(gradient)

    def end(self) -> None:
        if self._copies is not None:
            self._present = {
                p: squared_norm(p.grad if before is None else p.grad - before)
                for p, before in self._copies.items()
                if p.grad is not None
            }
        reached = set(self._present)
        if not self.squares:
            self._reached = reached
        self.uneven |= reached != self._reached
        self.squares.append(_total(list(self._present.values())))


def squared_norm(gradient: Tensor) -> Tensor:
    """|gradient|^2 as a 0-dim tensor; a contiguous gradient is not copied.

    A dot product, because `vector_norm` on a CPU sums 10 M float32 with an error of 4e-4 (dot:
    6e-6; docs/LOG.md). Half types are summed in float32.
    """
    flat = gradient.detach().reshape(-1)
    if flat.dtype in (torch.float32, torch.float64):
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
    return norm.square()


def _total(squares: list[Tensor]) -> Tensor:
    """Their sum in float64, on the device of the first."""
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    device = squares[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([s.to(device, wide, non_blocking=True) for s in squares]).sum()
