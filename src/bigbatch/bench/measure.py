"""What measuring costs: similarity, interval and second moment, beside the bytes they must read."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.bench.models import (
    count,
    random_batch,
    resnet18,
    transformer,
    wide_layers,
)
from bigbatch.bench.timing import Cost, interleaved
from bigbatch.measure.gsnr import GradientMoments
from bigbatch.measure.meter import GradientMeter
from bigbatch.measure.source import PlainSource

_K = 8


@dataclass(frozen=True)
class Shape:
    """A network and its micro-batches.

    Args:
        name: for the table.
        build: makes the network.
        samples: n_d, per micro-batch.
        length: of a sequence, or side of a picture.
        positions: T, tokens or positions of a micro-batch; None where layers differ.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: int
    length: int
    positions: int | None


SHAPES = [
    Shape("ResNet-18, 8 pictures", resnet18, 8, 32, None),
    Shape("transformer, 8 x 128 tokens", transformer, 8, 128, 1024),
    *(Shape(f"linear layers, T = {t}", wide_layers, t, 1, t) for t in (8, 32, 128, 512, 2048)),
]


def costs(rounds: int) -> Iterator[Cost]:
    """Every shape: a step of k = 8 micro-batches with the measurement, over the same without."""
    for shape in SHAPES:
        yield from shape_costs(shape, rounds)


def shape_costs(shape: Shape, rounds: int) -> Iterator[Cost]:
    """Similarity, similarity with interval, second moment: each on a copy of the network."""
    torch.manual_seed(0)
    model = shape.build()
    batches = [random_batch(model, shape.samples, shape.length) for _ in range(_K)]
    similarity, interval, moments = (copy.deepcopy(model) for _ in range(3))
    plain_meter, sure_meter = GradientMeter(similarity), GradientMeter(interval, interval=0.9)
    source = PlainSource(moments.parameters())
    source.subscribe(GradientMoments())
    samples = shape.samples * _K

    def step(net: nn.Module, then: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            _accumulate(net, batches)
            then()

        return run

    runs: list[Callable[[], None]] = [
        step(model, lambda: None),
        step(similarity, lambda: plain_meter.read(samples)),
        step(interval, lambda: sure_meter.read(samples)),
        step(moments, source.restart),
        lambda: _read(model),
        lambda: _add_in_place(model),
    ]
    times = interleaved(runs, rounds)
    read, add = (median(row[i] / row[0] for row in times) for i in (4, 5))
    kinds = [
        ("similarity", 1, 1 + read),
        ("similarity and interval", 2, 1 + 2 * read),
        ("second moment", 3, 1 + 20 / 8 * add),  # 20 bytes a weight, of which add_ moves 8
    ]
    for kind, number, floor in kinds:
        ratios = [row[number] / row[0] for row in times]
        yield Cost(f"{shape.name}, {count(model) / 1e6:.1f} M: {kind}", ratios, floor)


def _accumulate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
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


def peaks() -> Iterator[tuple[str, float, float]]:
    """(what, megabytes at most, gradient in megabytes) of a fresh process for each kind of run."""
    gradient = count(resnet18()) * 4 / 2**20
    for kind in ("plain", "similarity", "interval", "halves"):
        code = f"from bigbatch.bench.measure import peak; print(peak({kind!r}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
        yield f"ResNet-18, {kind}", float(done.stdout), gradient


def peak(kind: str) -> float:
    """Largest resident memory of three steps in this process, in megabytes."""
    torch.manual_seed(0)
    model = resnet18()
    batches = [random_batch(model, 8, 32) for _ in range(_K)]
    interval = 0.9 if kind == "interval" else None
    meter = None
    if kind != "plain":
        meter = GradientMeter(model, interval=interval, halves=kind == "halves")
    for _ in range(3):
        _accumulate(model, batches)
        if meter is not None:
            meter.read(8 * _K)
    status = Path("/proc/self/status").read_text()  # Linux; unlike ru_maxrss not inherited
    return float(status.split("VmHWM:")[1].split()[0]) / 1024
