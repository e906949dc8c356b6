"""The cost of an optimizer step: its time over the bytes that must move, and over its base.

python -m studies.optimizer_cost --lists "10 M in 16" --rounds 5
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bigbatch.kernels import native
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam
from studies.markdown_tables import Row, show
from studies.sized_networks import GPT, count, mean_loss, random_batch
from studies.timing import median_and_range, seconds

with torch.device("meta"):  # without memory, for its shapes
    _LAYER = nn.TransformerEncoderLayer(512, 8)


def _block(channels: int, channels_in: int) -> list[tuple[int, ...]]:
    """Shapes of two convolutions of 3 x 3, each with its BatchNorm."""
    kernels = [(channels, channels_in, 3, 3), (channels, channels, 3, 3)]
    return [shape for kernel in kernels for shape in (kernel, (channels,), (channels,))]


_RESNET56 = [  # not the network, which needs the recipes' packages
    *_block(16, 3)[:3],
    *_block(16, 16) * 9,
    *[
        shape
        for width in (32, 64)
        for shape in _block(width, width // 2) + _block(width, width) * 8
    ],
    (10, 64),
    (10,),
]
PARAMETER_LISTS: Mapping[str, Sequence[tuple[int, ...]]] = {  # shapes
    "1 M in 16": [(256, 256)] * 16,
    "10 M in 16": [(800, 800)] * 16,
    "24 layers, 76 M in 288": [p.shape for p in _LAYER.parameters()] * 24,
    "100 M in 16": [(2500, 2500)] * 16,
    "ResNet-56, 0.85 M in 167": _RESNET56,
}
_LARS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
_LAMB: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
_K = 2  # backwards before a timed step; their gradients do not change its time
_WARMUP = 3  # untimed steps, in which optimizers allocate their state and free buffers
_MIN_ELEMENTS = 20_000_000  # of the tensors that memory's speed is measured on; no cache has them

Make = Callable[[list[Tensor]], Optimizer]


@dataclass
class Contestant:
    """One optimizer, the least bytes a parameter that its step moves (float32), and its times."""

    name: str
    floor: int
    make: Make
    times: list[float] = field(default_factory=list)


def implementation() -> str:
    """The code that GSNR scaling, LARS and LAMB run on this machine's CPU."""
    compiled = native.library() is not None
    kind = "compiled kernels" if compiled else "torch operations (no C compiler at installation)"
    return f"{kind}, {torch.get_num_threads()} threads"


def teams() -> list[list[Contestant]]:
    """The optimizers that are timed together, in turn; the base comes first."""
    return [
        [
            Contestant("SGD, torch fused", 12, lambda p: SGD(p, 1e-3, fused=True)),
            Contestant("VR-SGD", 24, lambda p: VRSGD(p, 1e-3)),
        ],
        [
            Contestant("SGD momentum, torch fused", 20, lambda p: SGD(p, 1e-3, 0.9, fused=True)),
            Contestant("VR-Momentum", 32, lambda p: VRSGD(p, 1e-3, 0.9)),
        ],
        [
            Contestant("AdamW, torch fused", 28, lambda p: AdamW(p, 1e-3, fused=True)),
            Contestant("VR-Adam", 48, lambda p: VRAdam(p, 1e-3)),
            Contestant("VR-Adam, GSNR by torch", 48, lambda p: _vr_adam(p)),
        ],
        [
            Contestant("LARS", 28, lambda p: LARS(p, **_LARS)),
            Contestant("VR-LARS", 44, lambda p: VRLARS(p, **_LARS)),
        ],
        [
            Contestant("LAMB", 40, lambda p: LAMB(p, **_LAMB)),
            Contestant("VR-LAMB", 60, lambda p: VRLAMB(p, **_LAMB)),
        ],
    ]


def _vr_adam(parameters: list[Tensor]) -> Optimizer:
    """VR-Adam without our kernels, before the same fused step of torch."""
    base = AdamW(parameters, 1e-3, fused=True)
    return VarianceReduced(base, beta3=0.9, fused=False)


def step_rows(list_name: str, team: list[Contestant], rounds: int) -> Sequence[Row]:
    """Costs of `step()` alone, of optimizers timed in turn, on one of `PARAMETER_LISTS`."""
    torch.manual_seed(0)
    shapes = PARAMETER_LISTS[list_name]
    gradients = [torch.randn(shape) for shape in shapes]
    optimizers = [one.make([nn.Parameter(0.02 * torch.randn(s)) for s in shapes]) for one in team]
    speeds = []
    parameters = sum(gradient.numel() for gradient in gradients)
    x = torch.zeros(max(_MIN_ELEMENTS, parameters))
    for number in range(rounds + _WARMUP):
        speed = 2 * x.nbytes / seconds(lambda: x.add_(1))
        for one, optimizer in zip(team, optimizers, strict=True):
            _backwards(optimizer, gradients)
            step_seconds = seconds(optimizer.step)
            if number >= _WARMUP:
                one.times.append(step_seconds)
        if number >= _WARMUP:
            speeds.append(speed)
    rows = []
    for one in team:
        moved = [t * speed / parameters for t, speed in zip(one.times, speeds, strict=True)]
        ratios = [t / base for t, base in zip(one.times, team[0].times, strict=True)]
        rows.append(
            {
                "list": list_name,
                "optimizer": one.name,
                "ms": f"{1e3 * median(one.times):.2f}",
                "bytes a parameter": f"{median(moved):.0f}",
                "floor": f"{one.floor}",
                "x floor": median_and_range([size / one.floor for size in moved]),
                "x base": median_and_range(ratios),
            }
        )
    return rows


def _backwards(optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """Accumulates gradients that differ a little, as those of micro-batches do."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    for _ in range(_K):
        torch.autograd.backward(parameters, [g * torch.rand(()) for g in gradients])


def moment_rows(rounds: int, layers: int = 6) -> Iterator[Row]:
    """What the second moment adds to a backward, in bytes at the speed of `add_(1)`.

    The backwards of a transformer with few tokens are timed with it and without, k = 8.
    """
    kinds: dict[str, Make] = {
        "as installed": lambda p: VarianceReduced(SGD(p, 0.0)),
        "torch operations": lambda p: VarianceReduced(SGD(p, 0.0), fused=False),
        "nothing: how far two equal runs differ": lambda p: SGD(p, 0.0),
    }
    x = torch.zeros(_MIN_ELEMENTS)
    plain, parameters = _timed_backwards(lambda p: SGD(p, 0.0), layers)
    for kind, make in kinds.items():
        (with_moment, _), extra_bytes = _timed_backwards(make, layers), []
        for number in range(rounds + _WARMUP):
            speed = 2 * x.nbytes / seconds(lambda: x.add_(1))
            first, seconds_with, last = plain(), with_moment(), plain()
            if number >= _WARMUP:
                extra_seconds = seconds_with - (first + last) / 2
                extra_bytes.append(extra_seconds * speed / (8 * parameters))
        yield {
            "second moment, in a real backward": kind,
            "bytes a parameter and micro-batch": median_and_range(extra_bytes, digits=1),
        }


def _timed_backwards(make: Make, layers: int) -> tuple[Callable[[], float], int]:
    """(a step that returns the seconds of its 8 backwards of 64 tokens, number of parameters)."""
    torch.manual_seed(0)
    model = GPT(layers, 512, 256, 64)
    (x, y), optimizer = random_batch(model, 1, 64), make(list(model.parameters()))

    def step() -> float:
        total = 0.0
        for _ in range(8):
            loss = mean_loss(model, x, y) / 8
            total += seconds(loss.backward)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, count(model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of steps, and one of the second moment."""
    parser = argparse.ArgumentParser(description=__doc__)
    lists = list(PARAMETER_LISTS)
    parser.add_argument("--lists", nargs="+", choices=lists, default=lists, metavar="LIST")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each ratio")
    parser.add_argument("--tiny", action="store_true", help="one round of one list")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.lists, given.rounds = lists[:1], 1
    title = f"{implementation()}; median [least, most] of {given.rounds} interleaved rounds"
    steps = (
        row
        for name in given.lists
        for team in (teams()[:1] if given.tiny else teams())
        for row in step_rows(name, team, given.rounds)
    )
    show(title, steps)
    show(title, moment_rows(given.rounds, layers=1 if given.tiny else 6))


if __name__ == "__main__":
    main()
