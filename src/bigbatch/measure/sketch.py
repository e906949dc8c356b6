"""A gradient in a few floats: random signs keep its norms and angles on average."""

import torch
from torch import Tensor

from bigbatch.measure.norms import wide
from bigbatch.measure.source import GradientSource

_SIZE = 1021  # prime, so that the rows of a weight matrix do not line up with the fold's
_PROBED = 4096  # elements of one parameter that the probe reads
_PROBES = 8


class Sketches:
    """Subscriber of a source: each micro-batch's gradient folded into 1,021 floats.

    A tensor is read as rows of 1,021; each row is added with a random sign, the same for every
    micro-batch and on every rank. Sketches of sums are sums of sketches, and dot products of
    sketches estimate those of the gradients. Costs one read of each gradient.

    Source:
        Charikar et al. 2002 (count sketch); docs/theory.md (9).
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._sketches: list[Tensor] = []
        self._signs: dict[Tensor, Tensor] = {}  # one sign a row

    def begin(self) -> None:
        """A step starts."""
        self._sketches.clear()

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""
        self._sketches.append(self.none()[0])

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Folds the gradient into the present sketch."""
        flat = gradient.detach().reshape(-1)
        if flat.dtype not in (torch.float32, torch.float64):
            flat = flat.float()
        rows, rest = divmod(flat.numel(), _SIZE)
        signs = self._signs_of(parameter, flat)
        sketch = self._sketches[-1]
        if rows:
            folded = torch.mv(flat[: rows * _SIZE].view(rows, _SIZE).t(), signs[:rows])
            sketch.add_(folded.to(sketch.device, non_blocking=True))
        if rest:
            last = flat[rows * _SIZE :] * signs[rows]
            sketch[:rest].add_(last.to(sketch.device, non_blocking=True))

    def end(self) -> None:
        """The micro-batch is complete."""

    def stacked(self) -> Tensor:
        """The sketches of the step, (k, 1021)."""
        return torch.stack(self._sketches)

    def none(self) -> Tensor:
        """A sketch of no gradient, (1, 1021)."""
        return torch.zeros(1, _SIZE, device=self._parameters[0].device)

    def _signs_of(self, parameter: Tensor, flat: Tensor) -> Tensor:
        if parameter not in self._signs:
            seed = next(i for i, p in enumerate(self._parameters) if p is parameter)
            signs = random_signs((flat.numel() // _SIZE + 1,), seed)
            self._signs[parameter] = signs.to(flat.device, flat.dtype)
        return self._signs[parameter]


class Probe:
    """Subscriber of a source: eight projections of one small parameter's gradient, summed.

    What the hooks saw, added up over micro-batches and ranks, must be what stands in `.grad` at
    the end; the projections of both are compared. That finds an edit of `.grad` which moves no
    version counter (`unscale_`), a lossy or summing reduction, and gradients that were not seen.
    """

    def __init__(self, source: GradientSource) -> None:
        watched = [p for p in source.parameters if p.requires_grad and p.numel()]
        self._source = source
        self._parameter = min(watched, key=lambda p: abs(p.numel() - _PROBED)) if watched else None
        self._signs: Tensor | None = None  # of the probed elements, (8, elements)
        self._mine: Tensor | None = None  # of those that are in this rank's piece of .grad
        self._places: Tensor | None = None  # where they are
        self.seen = self.lengths = torch.zeros(())

    def begin(self) -> None:
        """A step starts."""
        device = self._device
        self.seen = torch.zeros(_PROBES, dtype=wide(device), device=device)
        self.lengths = torch.zeros((), dtype=wide(device), device=device)

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Projects the first elements of the gradient, if it is the probed one."""
        if parameter is self._parameter:
            signs = self._draw() if self._signs is None else self._signs
            projected = self._project(gradient.detach().reshape(-1)[:_PROBED], signs)
            self.seen += projected
            self.lengths += projected.norm()

    def end(self) -> None:
        """The micro-batch is complete."""

    def of_grad(self) -> Tensor:
        """The projections of this rank's piece of `.grad`, (8,)."""
        grad = None if self._parameter is None else self._source.local(self._parameter)
        if grad is None or self._mine is None:
            return torch.zeros_like(self.seen)
        piece = grad.detach().reshape(-1)[self._places]
        return self._project(piece, self._mine)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._parameter is None else self._parameter.device

    def _draw(self) -> Tensor:
        """Draws the signs of the probed elements, and which of those this rank holds."""
        assert self._parameter is not None
        probed = min(_PROBED, self._parameter.numel())
        numbers = torch.zeros(self._parameter.numel(), dtype=torch.int64, device=self._device)
        numbers[:probed] = torch.arange(1, probed + 1, device=self._device)
        held = self._source.piece(self._parameter, numbers.view(self._parameter.shape)).reshape(-1)
        self._places = held.nonzero().squeeze(1)
        self._signs = random_signs((_PROBES, probed), 0).to(self._device)
        self._mine = self._signs[:, held[self._places] - 1]
        return self._signs

    def _project(self, elements: Tensor, signs: Tensor) -> Tensor:
        kind = wide(elements.device)
        return torch.mv(signs.to(kind), elements.to(kind))


def random_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """-1 or 1, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, shape, generator=draw).mul_(2).sub_(1).float()
