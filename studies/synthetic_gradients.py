"""Gradients of known mean and variance, and steps of them that a meter measures."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch_recipes.datasets.idx_files import read_idx

SIMILARITIES = (0.1, 0.3, 0.7)  # similarities that N is chosen for

_DIMENSIONS, _EFFECTIVE = 20_000, 100  # elements; (tr Sigma)^2 / tr Sigma^2
_SCALE = 1000  # B_simple of the synthetic populations
_RECORDED = 10_000  # samples whose gradients are recorded
_STAGES = (0, 100, 1000)  # training steps before they are recorded
_LR, _BATCH, _CHUNK = 0.1, 64, 500

Shapes = Sequence[Sequence[int]]


class Population(ABC):
    """Per-sample gradients with a known mean and a known trace of their covariance.

    Args:
        name: the name in tables.
        mean: mu, (P,), float32.
        grad_variance: tr(Sigma).
        shapes: shapes of the parameters that the P elements belong to, in order.
        generator: the generator that samples are drawn from.
    """

    def __init__(
        self, name: str, mean: Tensor, grad_variance: float, shapes: Shapes, generator: Generator
    ) -> None:
        self.name = name
        self.mean = mean
        self.grad_sqnorm = float(mean.double().square().sum())
        self.grad_variance = grad_variance
        self.noise_scale = grad_variance / self.grad_sqnorm
        self._shapes = shapes
        self._generator = generator

    def similarity(self, samples: float, signal_factor: float = 1.0) -> float:
        """phi of a step of N samples, with the squared signal times `signal_factor`."""
        return 1 / (1 + 2 * self.noise_scale / (signal_factor * samples))

    def samples_for(self, similarity: float) -> float:
        """N at which phi is `similarity`."""
        return self.noise_scale * 2 * similarity / (1 - similarity)

    def parameters(self) -> list[Tensor]:
        """Zero-valued parameters for these gradients."""
        return [nn.Parameter(torch.zeros(*shape)) for shape in self._shapes]

    def gradients(self, sizes: Sequence[int], signal_factor: float = 1.0) -> Tensor:
        """Mean gradients of micro-batches of these sizes, drawn from new samples, (k, P)."""
        return self._deviations(sizes).add_(self.mean, alpha=math.sqrt(signal_factor))

    @abstractmethod
    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        """Deviations of the micro-batches' means from mu, (k, P)."""


class Elliptical(Population):
    """mu + s z per sample, z normal with covariance Sigma, s an independent scale.

    s^2 = (f - 2) / chi^2_f, which makes a sample's deviation a Student t of f degrees of freedom
    with covariance Sigma; f = 3 is the heaviest whole number that has one, and |g|^2 has no
    variance then. A mean of n samples, given their scales, is normal with covariance
    Sigma sum s^2 / n^2, so the scales of all samples are drawn but one z a micro-batch.

    Args:
        name: the name in tables.
        mean: mu, (P,).
        variances: diagonal of Sigma, (P,).
        freedom: f, above 2; None for s = 1, normal samples.
        generator: the generator that samples are drawn from.
    """

    def __init__(
        self, name: str, mean: Tensor, variances: Tensor, freedom: int | None, generator: Generator
    ) -> None:
        super().__init__(name, mean, float(variances.double().sum()), [mean.shape], generator)
        self._deviation = variances.sqrt()
        self._freedom = freedom

    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        scales = [math.sqrt(self._sum_of_squared_scales(n)) / n for n in sizes]
        z = torch.randn(len(sizes), len(self.mean), generator=self._generator)
        return z.mul_(self._deviation).mul_(torch.tensor(scales)[:, None])

    def _sum_of_squared_scales(self, samples: int) -> float:
        if self._freedom is None:
            return float(samples)
        z = torch.randn(samples, self._freedom, generator=self._generator, dtype=torch.float64)
        return float(((self._freedom - 2) / z.square().sum(1)).sum())


class Recorded(Population):
    """Recorded gradients of single samples, drawn with replacement.

    Args:
        name: the name in tables.
        gradients: one row per sample, (M, P), float32.
        shapes: shapes of the parameters.
        generator: the generator that samples are drawn from.
    """

    def __init__(self, name: str, gradients: Tensor, shapes: Shapes, generator: Generator) -> None:
        self._gradients = gradients
        chunks = torch.split(gradients, _CHUNK)
        mean = torch.stack([chunk.double().sum(0) for chunk in chunks]).sum(0) / len(gradients)
        squares = math.fsum(float((chunk.double() - mean).square().sum()) for chunk in chunks)
        super().__init__(name, mean.float(), squares / len(gradients), shapes, generator)

    def _deviations(self, sizes: Sequence[int]) -> Tensor:
        ends = torch.tensor(sizes).cumsum(0)
        rows = torch.randint(len(self._gradients), (int(ends[-1]),), generator=self._generator)
        starts = ends - torch.tensor(sizes)
        return functional.embedding_bag(rows, self._gradients, starts, mode="mean") - self.mean


def populations(seed: int, data: Path | None) -> Iterator[Population]:
    """Two synthetic populations, then one for each stage of training on Fashion-MNIST.

    The latter take 250 MB each; delete one before the next is built. They are left out with a
    warning where `data` has no folder `fashion-mnist` with the four files of its publisher.
    """
    yield synthetic("gaussian", None, seed)
    yield synthetic("heavy-tailed", 3, seed)
    folder = None if data is None else data / "fashion-mnist"
    if folder is None or not folder.is_dir():
        remedy = "name a data folder" if data is None else f"there is no {folder}"
        warnings.warn(f"without gradients of a trained network: {remedy}", stacklevel=2)
        return
    yield from recorded_stages(*read_images(folder), seed)


def synthetic(
    name: str, freedom: int | None, seed: int, dimensions: int = _DIMENSIONS
) -> Elliptical:
    """Elements of effective dimension 100; mu is larger in the noisy ones."""
    generator = Generator().manual_seed(seed)
    variances = spectrum(dimensions, _EFFECTIVE)
    variances = variances[torch.randperm(dimensions, generator=generator)]
    mean = variances**0.25 * torch.randn(dimensions, generator=generator)
    mean *= math.sqrt(1 / _SCALE) / mean.norm()
    return Elliptical(name, mean, variances, freedom, generator)


def spectrum(count: int, effective_dimension: float) -> Tensor:
    """Eigenvalues i^-a whose sum is 1, with a such that 1 / (sum of squares) is the dimension."""
    logs = torch.arange(1, count + 1, dtype=torch.float64).log()
    low, high = 0.0, 10.0
    for _ in range(60):
        exponent = (low + high) / 2
        values = torch.softmax(-exponent * logs, 0)
        too_flat = 1 / float(values.square().sum()) > effective_dimension
        low, high = (exponent, high) if too_flat else (low, exponent)
    return values.float()


def read_images(folder: Path) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST's training set: images (60000, 1, 28, 28), standardized, and labels."""
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 3)[:, None]
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 1)
    return (images.float() / 255 - 0.286) / 0.353, labels.long()


def recorded_stages(x: Tensor, y: Tensor, seed: int) -> Iterator[Recorded]:
    """Gradients of 10,000 samples before, early and late in training by SGD on all samples."""
    generator = Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network()
    samples = torch.randperm(len(y), generator=generator)[:_RECORDED]
    optimizer = torch.optim.SGD(model.parameters(), _LR)
    shapes = [p.shape for p in model.parameters()]
    for step in range(max(_STAGES) + 1):
        if step in _STAGES:
            gradients = per_sample_gradients(model, x[samples], y[samples])
            own_generator = Generator().manual_seed(seed + 1 + step)  # training draws from another
            yield Recorded(f"CNN, step {step}", gradients, shapes, own_generator)
        batch = torch.randint(len(y), (_BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def network() -> nn.Module:
    """Three convolutions and a linear layer, 6,162 parameters; GroupNorm without weights."""
    layers: list[nn.Module] = []
    for in_channels, channels in ((1, 8), (8, 16), (16, 32)):
        convolution = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(4, channels, affine=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def per_sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the cross-entropy of each sample, (M, P)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    gradients = torch.empty(len(y), sum(p.numel() for p in weights.values()))
    gradients_of = vmap(grad(loss), (None, 0, 0))
    for start in range(0, len(y), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        by_name = gradients_of(weights, x[chunk], y[chunk])
        gradients[chunk] = torch.cat([by_name[name].flatten(1) for name in weights], 1)
    return gradients


def measure_step(
    meter: GradientMeter, population: Population, sizes: Sequence[int], signal_factor: float = 1.0
) -> GradientStatistics:
    """Statistics that a meter of the population's `parameters()` reads of a step of new gradients.

    The micro-batches have these sizes, and the squared signal is times `signal_factor`.
    """
    accumulate_gradients(meter.source.parameters, population, sizes, signal_factor)
    statistics = meter.read(samples=sizes)
    assert statistics is not None
    return statistics


def accumulate_gradients(
    parameters: Sequence[Tensor],
    population: Population,
    sizes: Sequence[int],
    signal_factor: float = 1.0,
) -> None:
    """Sets `.grad` to the mean gradient of one step, by one weighted backward per micro-batch."""
    for parameter in parameters:
        parameter.grad = None
    shares = torch.tensor(sizes, dtype=torch.float32) / sum(sizes)
    for gradient in population.gradients(sizes, signal_factor) * shares[:, None]:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        torch.dot(flat, gradient).backward()  # type: ignore[no-untyped-call]
