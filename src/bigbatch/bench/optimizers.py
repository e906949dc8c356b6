"""What a variance-reduced step costs, and importing the library."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bigbatch.bench.timing import Cost, interleaved, seconds
from bigbatch.optim import VRSGD, VRAdam

_TENSORS, _SIDE = 16, 512  # 4.2 million parameters
_K = 8


def costs(rounds: int) -> Iterator[Cost]:
    """Measures everything, `rounds` times each, one after the other."""
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
        spent = []
        for optimizer in optimizers:
            optimizer.zero_grad()
            for scale in range(_K):
                loss = torch.stack([(p * scale).square().sum() for p in _all(optimizer)]).sum()
                loss.backward()  # type: ignore[no-untyped-call]
            spent.append(seconds(optimizer.step))
        if number >= 2:  # the first two allocate state
            ratios.append(spent[0] / spent[1])
    return Cost(what, ratios, floor)


def import_cost(rounds: int) -> Cost:
    """`import bigbatch` against `import torch`, each in a fresh process."""
    times = interleaved([lambda: _import("bigbatch"), lambda: _import("torch")], rounds)
    return Cost("import bigbatch / import torch", [ours / torchs for ours, torchs in times], 1.0)


def _import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)  # noqa: S603


def _parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(_SIDE, _SIDE)) for _ in range(_TENSORS)]


def _all(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
