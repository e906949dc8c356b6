"""What measuring and scaling cost: ratios inside one run, interleaved, beside their floor."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from bigbatch.measure.meter import GradientMeter
from bigbatch.optim import VRSGD, VRAdam

COLUMNS = ("what", "ratio", "least and most", "floor", "ratio / floor")

_TENSORS, _SIDE = 16, 512  # 4.2 million parameters for the optimizers
_MICRO, _K = 64, 8


@dataclass(frozen=True)
class Cost:
    """How much longer `what` takes than its baseline.

    Args:
        what: the thing and its baseline.
        ratios: one per round.
        floor: the ratio that the bytes to be moved allow.
    """

    what: str
    ratios: list[float]
    floor: float

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        middle = median(self.ratios)
        return (
            self.what,
            f"{middle:.3f}",
            f"{min(self.ratios):.3f} to {max(self.ratios):.3f}",
            f"{self.floor:.3f}",
            f"{middle / self.floor:.2f}",
        )


def costs(rounds: int) -> Iterator[Cost]:
    """Measures everything, `rounds` times each, one after the other."""
    yield meter_cost(rounds)
    yield step_cost(
        "VR-Momentum step / torch fused SGD",
        lambda p: VRSGD(p, 1e-3, 0.9, fused=True),
        lambda p: SGD(p, 1e-3, 0.9, fused=True),
        floor=32 / 20,
        rounds=rounds,
    )
    yield step_cost(
        "VR-Adam step / torch fused AdamW",
        lambda p: VRAdam(p, 1e-3, fused=True),
        lambda p: AdamW(p, 1e-3, fused=True),
        floor=48 / 28,
        rounds=rounds,
    )
    yield import_cost(rounds=3)


def meter_cost(rounds: int) -> Cost:
    """A step of k micro-batches with similarity measured, against the same step without.

    Floor: one read of every micro-gradient, timed as a dot product in the same round.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    batches = [(torch.randn(_MICRO, 784), torch.randint(10, (_MICRO,))) for _ in range(_K)]

    def accumulate() -> None:
        model.zero_grad()
        for x, y in batches:
            (functional.cross_entropy(model(x), y) / _K).backward()  # type: ignore[no-untyped-call]

    def measure() -> None:
        with GradientMeter(model) as meter:
            accumulate()
            meter.read(samples=_MICRO * _K)

    def read() -> None:
        for _ in range(_K):
            for p in model.parameters():
                assert p.grad is not None
                torch.dot(p.grad.view(-1), p.grad.view(-1))

    times = _interleaved([measure, accumulate, read], rounds)
    what = f"similarity every step, k = {_K}, {_MICRO} samples each / without"
    floor = 1 + median(read / plain for _, plain, read in times)
    return Cost(what, [with_ / plain for with_, plain, _ in times], floor)


def step_cost(
    what: str,
    variance_reduced: Callable[[list[Tensor]], Optimizer],
    base: Callable[[list[Tensor]], Optimizer],
    floor: float,
    rounds: int,
) -> Cost:
    """`optimizer.step()` alone; floor by the bytes per parameter."""
    optimizers = [variance_reduced(_parameters()), base(_parameters())]
    ratios = []
    for number in range(rounds + 2):
        seconds = []
        for optimizer in optimizers:
            optimizer.zero_grad()
            for scale in range(_K):
                loss = torch.stack([(p * scale).square().sum() for p in _all(optimizer)]).sum()
                loss.backward()  # type: ignore[no-untyped-call]
            seconds.append(_seconds(optimizer.step))
        if number >= 2:  # the first two allocate state
            ratios.append(seconds[0] / seconds[1])
    return Cost(what, ratios, floor)


def import_cost(rounds: int) -> Cost:
    """`import bigbatch` against `import torch`, each in a fresh process."""
    times = _interleaved([lambda: _import("bigbatch"), lambda: _import("torch")], rounds)
    return Cost("import bigbatch / import torch", [ours / torchs for ours, torchs in times], 1.0)


def _import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)  # noqa: S603


def _parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(_SIDE, _SIDE)) for _ in range(_TENSORS)]


def _all(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _interleaved(runs: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    for run in runs:
        run()
    return [[_seconds(run) for run in runs] for _ in range(rounds)]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
