"""The cost of measuring: time over the bytes that must be read, memory, bytes sent."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bigbatch.gradients import SingleProcessSource
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.second_moment import GradientMoments
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies.gloo_processes import count_bytes_sent
from studies.sized_networks import MicroBatches, count, random_batch, transformer, wide_layers
from studies.timing import Cost, Row, interleaved

_K = 8

Run = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """A network and its micro-batches.

    Args:
        name: the name in the table.
        build: builds the network.
        samples: n_d, samples of a micro-batch.
        length: length of a sequence, or side of an image.
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


def shape_costs(shape: Shape, rounds: int, device: str) -> Iterator[Cost]:
    """Time of a step of k = 8 micro-batches with each measurement over the step without.

    The kinds are nothing (one plain step over the other), similarity, interval, second moment. All
    are timed on one network, between two plain steps, whose mean is the baseline.
    """
    torch.manual_seed(0)
    model = shape.build()
    host_batches = [random_batch(model, shape.samples, shape.length) for _ in range(_K)]
    batches = [(x.to(device), y.to(device)) for x, y in host_batches]
    model.to(device)

    def plain() -> None:
        _accumulate(model, batches)

    runs: list[Run] = [
        plain,
        *(_metered(model, batches, confidence) for confidence in (None, 0.9)),
        _with_moments(model, batches),
        plain,
        lambda: _read(model),
        lambda: _add_in_place(model),
    ]
    times = interleaved(runs, rounds)
    second_plain = [row[4] for row in times]
    plain_mean = [(row[0] + row[4]) / 2 for row in times]
    read, add = (
        median(row[i] / base for row, base in zip(times, plain_mean, strict=True)) for i in (5, 6)
    )
    kinds = [
        ("nothing", 0, second_plain, 1.0),
        ("similarity", 1, plain_mean, 1 + read),
        ("similarity and interval", 2, plain_mean, 1 + 2 * read),
        # 20 bytes a weight, of which add_ moves 8
        ("second moment", 3, plain_mean, 1 + 20 / 8 * add),
    ]
    for kind, number, baseline, floor in kinds:
        ratios = [row[number] / base for row, base in zip(times, baseline, strict=True)]
        yield Cost(f"{shape.name}, {count(model) / 1e6:.1f} M: {kind}", ratios, floor)


def _metered(
    model: nn.Module, batches: MicroBatches, confidence: float | None
) -> Callable[[], None]:
    """A step that a meter measures; between such steps its hooks are off."""
    meter = GradientMeter(model, confidence=confidence, every=2)
    meter.next_step()

    def run() -> None:
        meter.at_step(0)
        _accumulate(model, batches)
        meter.read([len(x) for x, _ in batches])  # the next step is not measured

    return run


def _with_moments(model: nn.Module, batches: MicroBatches) -> Run:
    """A step whose second moments are accumulated; between such steps the hooks are off."""
    source, moments = SingleProcessSource(model.parameters()), GradientMoments()

    def run() -> None:
        source.subscribe(moments)
        _accumulate(model, batches)
        source.restart()
        source.unsubscribe(moments)

    return run


def _accumulate(model: nn.Module, batches: MicroBatches) -> None:
    model.zero_grad()
    for x, y in batches:
        (functional.cross_entropy(model(x), y) / _K).backward()  # type: ignore[no-untyped-call]


def _read(model: nn.Module) -> None:
    """The floor of a norm: reads every gradient once per micro-batch."""
    for _ in range(_K):
        for p in model.parameters():
            assert p.grad is not None
            flat = p.grad.reshape(-1)
            torch.dot(flat, flat)


@torch.no_grad()
def _add_in_place(model: nn.Module) -> None:
    """The unit of a moment's floor: moves 8 bytes a weight and micro-batch, in place."""
    for _ in range(_K):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(1.0)


METER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "similarity": {},
    "layers": {"per_layer": True},
    "interval": {"confidence": 0.9},
    "halves": {"half_batch_cosine": True},
}


def memory_and_bytes_sent() -> Iterator[Row]:
    """Peak memory of a process, and bytes that each of two ranks sends under DDP, on ResNet-18."""
    plain = 0
    for kind in METER_OPTIONS:
        sent = count_bytes_sent(functools.partial(_steps, kind))
        plain = sent if kind == "plain" else plain
        code = f"from studies.meter_cost import peak_memory; print(peak_memory({kind!r}))"
        command = [sys.executable, "-c", code]
        process = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
        yield {
            "what": f"ResNet-18: {kind}",
            "peak MB": f"{float(process.stdout):.0f}",
            "bytes sent a step": f"{sent:,}",
            "over the plain run": f"{sent - plain:,}",
        }


def peak_memory(kind: str) -> float:
    """Peak resident memory of this process over three steps, in megabytes.

    Args:
        kind: key of `METER_OPTIONS`; "plain" is without a meter.
    """
    for _ in _steps(kind, lambda model: model):
        pass
    status = Path("/proc/self/status").read_text()  # Linux; unlike ru_maxrss not inherited
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def _steps(kind: str, wrap: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Runs three steps of ResNet-18 (42.6 MB of weights)."""
    model = resnet_of_basic_blocks()
    batches = [random_batch(model, 8, 32) for _ in range(_K)]
    model = wrap(model)
    meter = None if kind == "plain" else GradientMeter(model, **METER_OPTIONS[kind])
    for _ in range(3):
        _accumulate(model, batches)
        if meter is not None:
            meter.read([8] * _K)
        yield
