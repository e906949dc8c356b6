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
        flat = gradient.reshape(-1)
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
        self._places: dict[Tensor, slice] = {}  # of each probed parameter, in `_elements`
        self._held: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of a rank: see `_held_of`
        self._device = source.parameters[0].device
        self.begin()

    def begin(self) -> None:
        """A step starts."""
        self._choose()
        self.seen = self._elements.new_zeros(_PROBES)
        self.lengths = self._elements.new_zeros(())  # summed over micro-batches

    def _choose(self) -> None:
        """Sixteen of those that are trained now, spread over the model."""
        trained = [p for p in self._source.parameters if p.requires_grad and p.numel()]
        chosen = trained[:: max(1, len(trained) // _PROBED)][:_PROBED]
        if [id(p) for p in chosen] == [id(p) for p in self._places]:
            return
        self._held.clear()
        self._places = {
            p: slice(_ELEMENTS * number, _ELEMENTS * number + min(_ELEMENTS, p.numel()))
            for number, p in enumerate(chosen)
        }
        kind = wide(self._device)
        self._elements = torch.zeros(_ELEMENTS * len(chosen), dtype=kind, device=self._device)
        self._signs = random_signs((_PROBES, _ELEMENTS * len(chosen)), 0).to(self._elements)

    def micro_batch(self, weight: float) -> None:
        """A micro-batch starts."""
        self._elements.zero_()

    def gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Keeps the first elements of the gradient, if it is a probed one."""
        place = self._places.get(parameter)
        if place is not None:
            elements = gradient.reshape(-1)[:_ELEMENTS]
            self._elements[place].copy_(elements, non_blocking=True)

    def end(self) -> None:
        """The micro-batch is complete."""
        present = torch.mv(self._signs, self._elements)
        self.seen += present
        self.lengths += present.norm()

    def of_grad(self) -> Tensor:
        """The projections of this rank's pieces of `.grad`, (8,)."""
        self._elements.zero_()
        for parameter, place in self._places.items():
            grad = self._source.local(parameter)
            if grad is not None:
                if parameter not in self._held:
                    self._held[parameter] = self._held_of(parameter)
                there, here = self._held[parameter]
                elements = grad.reshape(-1)[there].to(self._elements, non_blocking=True)
                self._elements[place].index_copy_(0, here, elements)
        return torch.mv(self._signs, self._elements)

    def _held_of(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the probed elements this rank's piece holds: where there, and their numbers.

        Waits for the device, but once.
        """
        numbers = torch.zeros(parameter.numel(), dtype=torch.int64, device=parameter.device)
        count = min(_ELEMENTS, parameter.numel())
        numbers[:count] = torch.arange(1, count + 1, device=parameter.device)
        held = self._source.piece(parameter, numbers.view(parameter.shape)).reshape(-1)
        there = held.nonzero().squeeze(1)
        return there, (held[there] - 1).to(self._device)


def random_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """-1 or 1, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, shape, generator=draw, device="cpu").mul_(2).sub_(1).to(torch.float32)
