"""What measuring costs: time against the bytes it must read, memory, bytes sent."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.bench.gloo_processes import count_bytes_sent
from bigbatch.bench.sized_networks import count, random_batch, transformer, wide_layers
from bigbatch.bench.timing import Cost, interleaved
from bigbatch.experiments.models.resnet import resnet_of_basic_blocks
from bigbatch.gradients import SingleProcessSource
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.second_moment import GradientMoments

_K = 8


@dataclass(frozen=True)
class Shape:
    """A network and its micro-batches.

    Args:
        name: for the table.
        build: makes the network.
        samples: n_d, per micro-batch.
        length: of a sequence, or side of an image.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: int
    length: int


SHAPES = [
    Shape("ResNet-18, 8 images", resnet_of_basic_blocks, 8, 32),
    Shape("ResNet-18, 32 images", resnet_of_basic_blocks, 32, 32),
    Shape("transformer, T = 8 x 128", transformer, 8, 128),
    *(Shape(f"linear layers, T = {t}", wide_layers, t, 1) for t in (8, 32, 128, 512, 2048)),
]


def costs(rounds: int, device: str) -> Iterator[Cost]:
    """Every shape: a step of k = 8 micro-batches with the measurement, over the same without."""
    for shape in SHAPES:
        yield from shape_costs(shape, rounds, device)


def shape_costs(shape: Shape, rounds: int, device: str) -> Iterator[Cost]:
    """Nothing (one plain step over the other), similarity, interval, second moment.

    All on one network, between two steps without any of them, whose mean is the baseline.
    """
    torch.manual_seed(0)
    model = shape.build()
    drawn = [random_batch(model, shape.samples, shape.length) for _ in range(_K)]
    batches = [(x.to(device), y.to(device)) for x, y in drawn]
    model.to(device)

    def plain() -> None:
        _accumulate(model, batches)

    runs: list[Callable[[], None]] = [
        plain,
        *(_metered(model, batches, interval) for interval in (None, 0.9)),
        _with_moments(model, batches),
        plain,
        lambda: _read(model),
        lambda: _add_in_place(model),
    ]
    times = interleaved(runs, rounds)
    again = [row[4] for row in times]
    base = [(row[0] + row[4]) / 2 for row in times]
    read, add = (median(row[i] / b for row, b in zip(times, base, strict=True)) for i in (5, 6))
    kinds = [
        ("nothing", 0, again, 1.0),
        ("similarity", 1, base, 1 + read),
        ("similarity and interval", 2, base, 1 + 2 * read),
        ("second moment", 3, base, 1 + 20 / 8 * add),  # 20 bytes a weight, of which add_ moves 8
    ]
    for kind, number, compared, floor in kinds:
        ratios = [row[number] / b for row, b in zip(times, compared, strict=True)]
        yield Cost(f"{shape.name}, {count(model) / 1e6:.1f} M: {kind}", ratios, floor)


_Batches = list[tuple[Tensor, Tensor]]


def _metered(model: nn.Module, batches: _Batches, interval: float | None) -> Callable[[], None]:
    """A step that is measured; its hooks are off outside."""
    meter = GradientMeter(model, confidence=interval, every=2)
    meter.next_step()

    def run() -> None:
        meter.at_step(0)
        _accumulate(model, batches)
        meter.read([len(x) for x, _ in batches])  # the next one is not due

    return run


def _with_moments(model: nn.Module, batches: _Batches) -> Callable[[], None]:
    """A step whose second moments are taken; its hooks are off outside."""
    source, moments = SingleProcessSource(model.parameters()), GradientMoments()

    def run() -> None:
        source.subscribe(moments)
        _accumulate(model, batches)
        source.restart()
        source.unsubscribe(moments)

    return run


def _accumulate(model: nn.Module, batches: _Batches) -> None:
    model.zero_grad()
    for x, y in batches:
        (functional.cross_entropy(model(x), y) / _K).backward()  # type: ignore[no-untyped-call]


def _read(model: nn.Module) -> None:
    """The floor of a norm: every gradient is read once a micro-batch."""
    for _ in range(_K):
        for p in model.parameters():
            assert p.grad is not None
            flat = p.grad.reshape(-1)
            torch.dot(flat, flat)


@torch.no_grad()
def _add_in_place(model: nn.Module) -> None:
    """The yardstick of a moment: 8 bytes a weight and micro-batch, read and written in place."""
    for _ in range(_K):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(1.0)


@dataclass(frozen=True)
class Resources:
    """What a kind of run takes in addition to time, on ResNet-18 (42.6 MB); a row of a table.

    Args:
        kind: key of `KINDS`, or "plain".
        peak: largest resident memory of a fresh process, in megabytes.
        sent: bytes that a rank sends each step.
        over: how many of them the run without a meter does not.
    """

    kind: str
    peak: float
    sent: int
    over: int

    def row(self) -> tuple[str, ...]:
        """For a table under `RESOURCES`."""
        return f"ResNet-18: {self.kind}", f"{self.peak:.0f}", f"{self.sent:,}", f"{self.over:,}"


RESOURCES = ("what", "peak MB", "bytes sent a step", "over the plain run")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "similarity": {},
    "layers": {"per_layer": True},
    "interval": {"confidence": 0.9},
    "halves": {"half_batch_cosine": True},
}


def resources() -> Iterator[Resources]:
    """Memory in one process, and what each of two ranks sends under DDP."""
    plain = 0
    for kind in KINDS:
        sent = count_bytes_sent(functools.partial(_steps, kind))
        plain = sent if kind == "plain" else plain
        code = f"from bigbatch.bench.meter_cost import peak; print(peak({kind!r}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
        yield Resources(kind, float(done.stdout), sent, sent - plain)


def peak(kind: str) -> float:
    """Largest resident memory of three steps in this process, in megabytes."""
    for _ in _steps(kind, lambda model: model):
        pass
    status = Path("/proc/self/status").read_text()  # Linux; unlike ru_maxrss not inherited
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def _steps(kind: str, wrap: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Three steps of ResNet-18."""
    model = resnet_of_basic_blocks()
    batches = [random_batch(model, 8, 32) for _ in range(_K)]
    model = wrap(model)
    meter = None if kind == "plain" else GradientMeter(model, **KINDS[kind])
    for _ in range(3):
        _accumulate(model, batches)
        if meter is not None:
            meter.read([8] * _K)
        yield
