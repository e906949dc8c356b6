"""A gradient in a few floats: random signs keep its norms and angles on average."""

import torch
from torch import Tensor

from bigbatch.measure.norms import wide
from bigbatch.measure.source import GradientSource

_SIZE = 1021  # prime, so that the rows of a weight matrix do not line up with the fold's
_PROBES = 8  # projections
_PROBED = 16  # parameters, so many elements of each
_ELEMENTS = 256


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
        device = self._parameters[0].device
        return torch.zeros(1, _SIZE, dtype=torch.float32, device=device)

    def _signs_of(self, parameter: Tensor, flat: Tensor) -> Tensor:
        if parameter not in self._signs:
            seed = next(i for i, p in enumerate(self._parameters) if p is parameter)
            signs = random_signs((flat.numel() // _SIZE + 1,), seed)
            self._signs[parameter] = signs.to(flat.device, flat.dtype)
        return self._signs[parameter]


class Probe:
    """Subscriber of a source: eight projections of a few elements of some parameters, summed.

    What the hooks saw, added up over micro-batches and ranks, must be what stands in `.grad` at
    the end; the projections of both are compared. That finds an edit of `.grad` which moves no
    version counter (`unscale_`), a lossy or summing reduction, and gradients that were not seen.
    It reads 256 elements of each of 16 parameters, so an edit of any other alone is not found.
    """

    def __init__(self, source: GradientSource) -> None:
        self._source = source
        self._chosen: list[Tensor] = []
        self._signs: dict[Tensor, Tensor] = {}  # of the probed elements, (8, elements)
        self._places: dict[Tensor, Tensor] = {}  # where they are in this rank's piece
        self._mine: dict[Tensor, Tensor] = {}  # the signs of those
        self._device = source.parameters[0].device
        self.begin()

    def begin(self) -> None:
        """A step starts."""
        self._choose()
        kind = wide(self._device)
        self.seen = torch.zeros(_PROBES, dtype=kind, device=self._device)
        self.lengths = torch.zeros((), dtype=kind, device=self._device)  # summed over micro-batches
        self.micro_batch(0.0)

    def _choose(self) -> None:
        """Sixteen of those that are trained now, spread over the model."""
        trained = [p for p in self._source.parameters if p.requires_grad and p.numel()]
        chosen = trained[:: max(1, len(trained) // _PROBED)][:_PROBED]
        same = len(chosen) == len(self._chosen)
        if same and all(p is q for p, q in zip(chosen, self._chosen, strict=True)):
            return
        self._chosen = chosen
        self._places.clear()
        self._signs = {
            p: random_signs((_PROBES, min(_ELEMENTS, p.numel())), number).to(p.device)
            for number, p in enumerate(chosen)
        }

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""
        self._present = torch.zeros_like(self.seen)

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Projects the first elements of the gradient, if it is a probed one."""
        if parameter in self._signs:
            elements = gradient.detach().reshape(-1)[:_ELEMENTS]
            self._present += self._projected(elements, self._signs[parameter])

    def end(self) -> None:
        """The micro-batch is complete."""
        self.seen += self._present
        self.lengths += self._present.norm()

    def of_grad(self) -> Tensor:
        """The projections of this rank's pieces of `.grad`, (8,)."""
        total = torch.zeros_like(self.seen)
        for parameter in self._signs:
            grad = self._source.local(parameter)
            if grad is not None:
                if parameter not in self._places:
                    self._locate(parameter)
                elements = grad.detach().reshape(-1)[self._places[parameter]]
                total += self._projected(elements, self._mine[parameter])
        return total

    def _locate(self, parameter: Tensor) -> None:
        """Finds which of the probed elements this rank holds, and where; waits, but once."""
        signs = self._signs[parameter]
        numbers = torch.zeros(parameter.numel(), dtype=torch.int64, device=signs.device)
        numbers[: signs.shape[1]] = torch.arange(1, signs.shape[1] + 1, device=signs.device)
        held = self._source.piece(parameter, numbers.view(parameter.shape)).reshape(-1)
        self._places[parameter] = held.nonzero().squeeze(1)
        self._mine[parameter] = signs[:, held[self._places[parameter]] - 1]

    def _projected(self, elements: Tensor, signs: Tensor) -> Tensor:
        kind = wide(elements.device)
        return torch.mv(signs.to(kind), elements.to(kind)).to(self._device, non_blocking=True)


def random_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """-1 or 1, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, shape, generator=draw, device="cpu").mul_(2).sub_(1).to(torch.float32)
