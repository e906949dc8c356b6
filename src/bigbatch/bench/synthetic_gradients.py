"""Gradients whose truth is known, and steps that a meter measures of them."""

import gzip
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics

SIMILARITIES = (0.1, 0.3, 0.7)  # of steps that are compared: N is chosen for them

_DIMENSIONS, _EFFECTIVE = 20_000, 100  # elements; (tr Sigma)^2 / tr Sigma^2
_SCALE = 1000  # B_simple of the populations that are made up
_RECORDED = 10_000  # samples whose gradients are kept
_STAGES = (0, 100, 1000)  # training steps before they are taken
_RATE, _BATCH, _CHUNK = 0.1, 64, 500

Shapes = Sequence[Sequence[int]]


class Population(ABC):
    """Per-sample gradients with a known mean and a known trace of their covariance.

    Args:
        name: for tables.
        mean: mu, (P,), float32.
        noise: tr(Sigma).
        shapes: of the parameters that the P elements belong to, in order.
        draw: where its samples come from.
    """

    def __init__(
        self, name: str, mean: Tensor, noise: float, shapes: Shapes, draw: Generator
    ) -> None:
        self.name = name
        self.mean = mean
        self.grad_sqnorm = float(mean.double().square().sum())
        self.grad_variance = noise
        self.noise_scale = noise / self.grad_sqnorm
        self._shapes = shapes
        self._draw = draw

    def similarity(self, samples: float, pull: float = 1.0) -> float:
        """phi of a step of N samples, the signal being `pull` times what it is."""
        return 1 / (1 + 2 * self.noise_scale / (pull * samples))

    def samples_for(self, similarity: float) -> float:
        """N at which phi is this."""
        return self.noise_scale * 2 * similarity / (1 - similarity)

    def parameters(self) -> list[Tensor]:
        """Parameters of zeros, whose gradients these are."""
        return [nn.Parameter(torch.zeros(*shape)) for shape in self._shapes]

    def gradients(self, sizes: Sequence[int], pull: float = 1.0) -> Tensor:
        """Mean gradients of micro-batches of so many fresh samples each, (k, P)."""
        return self._deviations(sizes).add_(self.mean, alpha=math.sqrt(pull))

    @abstractmethod
    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        """Those of the micro-batches' means from mu."""


class Elliptical(Population):
    """mu + s z per sample, z normal with covariance Sigma, s an independent scale.

    s^2 = (f - 2) / chi^2_f, which makes a sample's deviation a Student t of f degrees of freedom
    with covariance Sigma; f = 3 is the heaviest whole number that has one, and |g|^2 has no
    variance then. A mean of n samples, given their scales, is normal with covariance
    Sigma sum s^2 / n^2, so the scales of all samples are drawn but one z a micro-batch.

    Args:
        name: for tables.
        mean: mu, (P,).
        variances: diagonal of Sigma, (P,).
        freedom: f, above 2; None for s = 1, normal samples.
        draw: where its samples come from.
    """

    def __init__(
        self, name: str, mean: Tensor, variances: Tensor, freedom: int | None, draw: Generator
    ) -> None:
        super().__init__(name, mean, float(variances.double().sum()), [mean.shape], draw)
        self._deviation = variances.sqrt()
        self._freedom = freedom

    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        scales = [math.sqrt(self._squares(n)) / n for n in sizes]
        z = torch.randn(len(sizes), len(self.mean), generator=self._draw)
        return z.mul_(self._deviation).mul_(torch.tensor(scales)[:, None])

    def _squares(self, samples: int) -> float:
        """Sum of s^2 over so many samples."""
        if self._freedom is None:
            return float(samples)
        z = torch.randn(samples, self._freedom, generator=self._draw, dtype=torch.float64)
        return float(((self._freedom - 2) / z.square().sum(1)).sum())


class Recorded(Population):
    """Gradients of single samples as they were computed, drawn with replacement.

    Args:
        name: for tables.
        gradients: one row a sample, (M, P), float32.
        shapes: of the parameters.
        draw: where its samples come from.
    """

    def __init__(self, name: str, gradients: Tensor, shapes: Shapes, draw: Generator) -> None:
        self._gradients = gradients
        parts = torch.split(gradients, _CHUNK)
        mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(gradients)
        spread = math.fsum(float((part.double() - mean).square().sum()) for part in parts)
        super().__init__(name, mean.float(), spread / len(gradients), shapes, draw)

    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        ends = torch.tensor(sizes).cumsum(0)
        rows = torch.randint(len(self._gradients), (int(ends[-1]),), generator=self._draw)
        starts = ends - torch.tensor(sizes)
        return functional.embedding_bag(rows, self._gradients, starts, mode="mean") - self.mean


def populations(seed: int, data: Path | None) -> Iterator[Population]:
    """Two that are made up, then one for each stage of training on Fashion-MNIST.

    The latter are 250 MB each: let one go before the next is asked for. They are left out, with a
    note, where `data` has no folder `fashion-mnist` with the four files of its publisher.
    """
    yield elliptical("gaussian", None, seed)
    yield elliptical("heavy-tailed", 3, seed)
    folder = None if data is None else data / "fashion-mnist"
    if folder is None or not folder.is_dir():
        where = "name a data folder" if data is None else f"there is no {folder}"
        warnings.warn(f"without gradients of a trained network: {where}", stacklevel=2)
        return
    yield from recorded(*images(folder), seed)


def elliptical(name: str, freedom: int | None, seed: int) -> Elliptical:
    """20,000 elements of effective dimension 100; mu leans to the noisy ones, and lies in all."""
    draw = Generator().manual_seed(seed)
    variances = spectrum(_DIMENSIONS, _EFFECTIVE)
    variances = variances[torch.randperm(_DIMENSIONS, generator=draw)]
    mean = variances**0.25 * torch.randn(_DIMENSIONS, generator=draw)
    mean *= math.sqrt(1 / _SCALE) / mean.norm()
    return Elliptical(name, mean, variances, freedom, draw)


def spectrum(count: int, effective: float) -> Tensor:
    """Eigenvalues i^-a, their sum 1, with a such that 1 / (their squares' sum) is `effective`."""
    logs = torch.arange(1, count + 1, dtype=torch.float64).log()
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        values = torch.softmax(-middle * logs, 0)
        flat = 1 / float(values.square().sum()) > effective
        low, high = (middle, high) if flat else (low, middle)
    return values.float()


def images(folder: Path) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST's training set: images (60000, 1, 28, 28), standardized, and labels."""
    x = _bytes(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    y = _bytes(folder / "train-labels-idx1-ubyte.gz", 8)
    return (torch.tensor(x).float() / 255 - 0.286) / 0.353, torch.tensor(y).long()


def recorded(x: Tensor, y: Tensor, seed: int) -> Iterator[Recorded]:
    """Gradients of 10,000 samples, before, early and late in training by SGD on all of them."""
    draw = Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network()
    kept = torch.randperm(len(y), generator=draw)[:_RECORDED]
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    shapes = [p.shape for p in model.parameters()]
    for step in range(max(_STAGES) + 1):
        if step in _STAGES:
            rows = Generator().manual_seed(seed + 1 + step)  # so what is drawn changes no training
            yield Recorded(f"CNN, step {step}", of_each(model, x[kept], y[kept]), shapes, rows)
        batch = torch.randint(len(y), (_BATCH,), generator=draw)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def network() -> nn.Module:
    """Three convolutions and a linear layer, 6,162 parameters; GroupNorm without weights."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16), (16, 32)):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(4, after, affine=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def of_each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's cross-entropy by itself, (M, P)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    gradients = torch.empty(len(y), sum(p.numel() for p in weights.values()))
    one_each = vmap(grad(loss), (None, 0, 0))
    for start in range(0, len(y), _CHUNK):
        part = slice(start, start + _CHUNK)
        found = one_each(weights, x[part], y[part])
        gradients[part] = torch.cat([found[name].flatten(1) for name in weights], 1)
    return gradients


def measured(
    meter: GradientMeter, population: Population, sizes: Sequence[int], pull: float = 1.0
) -> GradientStatistics:
    """One step of fresh gradients, each by a backward of its own, as `meter` reads it.

    Args:
        meter: of the population's `parameters()`.
        population: what is drawn from.
        sizes: n_d.
        pull: factor of the signal.
    """
    backwards(meter.source.parameters, population, sizes, pull)
    noise = meter.read(samples=sizes)
    assert noise is not None
    return noise


def backwards(
    parameters: Sequence[Tensor], population: Population, sizes: Sequence[int], pull: float = 1.0
) -> None:
    """Those of one step, whose losses are weighted, into an empty `.grad`."""
    for parameter in parameters:
        parameter.grad = None
    shares = torch.tensor(sizes, dtype=torch.float32) / sum(sizes)
    for gradient in population.gradients(sizes, pull) * shares[:, None]:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        torch.dot(flat, gradient).backward()  # type: ignore[no-untyped-call]


def _bytes(file: Path, header: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    with gzip.open(file) as stream:
        return np.frombuffer(stream.read(), np.uint8, offset=header)
