"""What an optimizer step costs: time, over the bytes that must move, and over its base."""

import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bigbatch.bench.sized_networks import random_batch, transformer
from bigbatch.bench.timing import Cost, interleaved, seconds
from bigbatch.kernels import native
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam

COLUMNS = (
    "list",
    "optimizer",
    "ms",
    "bytes a parameter",
    "floor",
    "x floor in place",
    "x floor by copy",
    "x base",
)
MOMENT_COLUMNS = ("second moment, in a real backward", "bytes a parameter and micro-batch")
_LAYER = [
    (1536, 512),
    (1536,),
    (512, 512),
    (512,),
    (2048, 512),
    (2048,),
    (512, 2048),
    *[(512,)] * 5,
]


def _block(channels: int, before: int) -> list[tuple[int, ...]]:
    """Two convolutions of 3 x 3, each with its BatchNorm."""
    kernels = [(channels, before, 3, 3), (channels, channels, 3, 3)]
    return [shape for kernel in kernels for shape in (kernel, (channels,), (channels,))]


_RESNET56 = [
    *_block(16, 3)[:3],
    *_block(16, 16) * 9,
    *_block(32, 16),
    *_block(32, 32) * 8,
    *_block(64, 32),
    *_block(64, 64) * 8,
    (10, 64),
    (10,),
]
LISTS: dict[str, list[tuple[int, ...]]] = {
    "1 M in 16": [(256, 256)] * 16,
    "10 M in 16": [(800, 800)] * 16,
    "24 layers, 76 M in 288": _LAYER * 24,
    "100 M in 16": [(2500, 2500)] * 16,
    "ResNet-56, 0.85 M in 167": _RESNET56,
}
_LARS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
_LAMB: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
_K = 2  # backwards before a timed step: what they bring does not change its time
_WARM = 3  # steps that are not counted: they make state, and free what is not needed
_YARDSTICK = 20_000_000  # elements at least, beyond the caches; as many as the parameters

Make = Callable[[list[Tensor]], Optimizer]


@dataclass
class Contestant:
    """One optimizer, and how many bytes a parameter its step cannot avoid to move (float32)."""

    name: str
    floor: int
    make: Make
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepCost:
    """One row: what a step took, and memory's speed in the same rounds.

    Args:
        over: which list of parameters.
        contestant: which optimizer.
        parameters: how many.
        base: seconds of its base in the same rounds.
        in_place, copy: bytes per second of `add_(1)` and of `copy_`, in the same rounds.
    """

    over: str
    contestant: Contestant
    parameters: int
    base: list[float]
    in_place: list[float]
    copy: list[float]

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`; medians over the rounds, least and most of the ratios."""
        times, floor = self.contestant.times, self.contestant.floor
        in_place = [t * b / self.parameters for t, b in zip(times, self.in_place, strict=True)]
        copy = [t * b / self.parameters for t, b in zip(times, self.copy, strict=True)]
        over_base = [t / b for t, b in zip(times, self.base, strict=True)]
        return (
            self.over,
            self.contestant.name,
            f"{1e3 * median(times):.2f}",
            f"{median(in_place):.0f}",
            f"{floor}",
            _spread([b / floor for b in in_place]),
            _spread([b / floor for b in copy]),
            _spread(over_base),
        )


@dataclass(frozen=True)
class MomentCost:
    """What the second moment adds to a backward, in bytes at the speed of `add_(1)`."""

    what: str
    bytes: list[float]

    def row(self) -> tuple[str, ...]:
        """For a table under `MOMENT_COLUMNS`."""
        return (
            self.what,
            f"{median(self.bytes):.1f} [{min(self.bytes):.1f}, {max(self.bytes):.1f}]",
        )


def implementation() -> str:
    """Which code GSNR scaling, LARS and LAMB run through on this machine's CPU."""
    built = native.library() is not None
    kind = "compiled kernels" if built else "torch operations (no C compiler at installation)"
    return f"{kind}, {torch.get_num_threads()} threads"


def teams() -> list[list[Contestant]]:
    """Who is timed together, in turn: the base first."""
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
            Contestant("VR-Adam, GSNR by torch", 48, lambda p: _vr_adam(p, compiled=False)),
            Contestant("VR-Adam, GSNR compiled", 48, lambda p: _vr_adam(p, compiled=True)),
        ],
        [
            Contestant("LARS", 28, lambda p: LARS(p, **_LARS)),
            Contestant("VR-LARS", 44, lambda p: VRLARS(p, **_LARS)),
            *_rivals("LARS", 28, _LARS),
        ],
        [
            Contestant("LAMB", 40, lambda p: LAMB(p, **_LAMB)),
            Contestant("VR-LAMB", 60, lambda p: VRLAMB(p, **_LAMB)),
            *_rivals("LAMB", 40, _LAMB),
        ],
    ]


def _vr_adam(parameters: list[Tensor], *, compiled: bool) -> Optimizer:
    """VR-Adam without kernels, before the same fused step."""
    base = AdamW(parameters, 1e-3, fused=True)
    return VarianceReduced(base, beta3=0.9, fused=False, compiled=compiled)


def _rivals(name: str, floor: int, settings: dict[str, Any]) -> list[Contestant]:
    """Other packages' LARS or LAMB, where they are installed."""
    found = []
    for package, of, no_limit in (
        ("pytorch_optimizer", _pytorch_optimizers, 0.0),
        ("timm", timm_optimizer, None),
    ):
        with suppress(ImportError):
            make: Callable[..., Optimizer] = of(name)
            if name == "LAMB":  # which clips by itself there, and not here
                make = functools.partial(make, max_grad_norm=no_limit)
            found.append(
                Contestant(f"{name}, {package}", floor, functools.partial(make, **settings))
            )
    return found


def _pytorch_optimizers(name: str) -> type[Optimizer]:
    module = importlib.import_module("pytorch_optimizer")
    made: type[Optimizer] = module.load_optimizer(name)
    return made


def timm_optimizer(name: str) -> type[Optimizer]:
    """LARS or LAMB of timm, without importing the rest of it, which wants a torchvision that fits.

    Raises:
        ImportError: it is not installed.
    """
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        raise ImportError("timm is not installed")
    package = ModuleType("_timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules.setdefault(package.__name__, package)
    module = importlib.import_module(f"{package.__name__}.{name.lower()}")
    made: type[Optimizer] = getattr(module, name.capitalize())
    return made


def step_costs(over: str, rounds: int) -> Iterator[StepCost]:
    """`step()` alone, of every team over one of `LISTS`."""
    for team in teams():
        yield from _team_costs(over, team, rounds)


def _team_costs(over: str, team: list[Contestant], rounds: int) -> list[StepCost]:
    torch.manual_seed(0)
    shapes = LISTS[over]
    gradients = [torch.randn(shape) for shape in shapes]
    optimizers = [one.make([nn.Parameter(0.02 * torch.randn(s)) for s in shapes]) for one in team]
    in_place, copy = [], []
    count = sum(gradient.numel() for gradient in gradients)
    x, y = torch.zeros(2, max(_YARDSTICK, count)).unbind()
    for number in range(rounds + _WARM):
        bandwidths = [
            2 * x.nbytes / seconds(run) for run in (lambda: x.add_(1), lambda: y.copy_(x))
        ]
        for one, optimizer in zip(team, optimizers, strict=True):
            _backwards(optimizer, gradients)
            spent = seconds(optimizer.step)
            if number >= _WARM:
                one.times.append(spent)
        if number >= _WARM:
            in_place.append(bandwidths[0])
            copy.append(bandwidths[1])
    return [StepCost(over, one, count, team[0].times, in_place, copy) for one in team]


def _backwards(optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """Fresh gradients that differ a little, as micro-batches' do."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    for _ in range(_K):
        torch.autograd.backward(parameters, [g * torch.rand(()) for g in gradients])


def moment_costs(rounds: int) -> Iterator[MomentCost]:
    """Backwards of a transformer with few tokens, with the moments and without, k = 8."""
    kinds: dict[str, Make] = {
        "as installed": lambda p: VarianceReduced(SGD(p, 0.0)),
        "torch operations": lambda p: VarianceReduced(SGD(p, 0.0), fused=False),
        "nothing: how far two equal runs differ": lambda p: SGD(p, 0.0),
    }
    x = torch.zeros(_YARDSTICK)
    plain = _Backwards(lambda p: SGD(p, 0.0))
    for what, make in kinds.items():
        other, extra = _Backwards(make), []
        for number in range(rounds + _WARM):
            speed = 2 * x.nbytes / seconds(lambda: x.add_(1))
            before, with_, after = (run.seconds() for run in (plain, other, plain))
            if number >= _WARM:
                without = (before + after) / 2
                extra.append((with_ - without) * speed / (8 * plain.parameters))
        yield MomentCost(what, extra)


class _Backwards:
    """Eight backwards of a network whose weights see 64 tokens each."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self._model = transformer()
        self._batch = random_batch(self._model, 1, 64)
        self._optimizer = make(list(self._model.parameters()))
        self.parameters = sum(p.numel() for p in self._model.parameters())

    def seconds(self) -> float:
        """Of the backwards alone; the step between is not timed."""
        x, y = self._batch
        spent = 0.0
        for _ in range(8):
            loss = nn.functional.cross_entropy(self._model(x), y) / 8
            spent += seconds(loss.backward)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return spent


def import_cost(rounds: int) -> Cost:
    """`import bigbatch` against `import torch`, each in a fresh process."""
    times = interleaved([lambda: _import("bigbatch"), lambda: _import("torch")], rounds)
    return Cost("import bigbatch / import torch", [ours / torchs for ours, torchs in times], 1.0)


def _import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)  # noqa: S603


def _spread(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
