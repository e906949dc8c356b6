"""What a step asks of a device: operations, waits of the host and copies, on a simulated one.

python -m studies.launches
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.optim import VRLAMB, VRLARS, VRSGD, VRAdam
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from studies.markdown_tables import Row, show
from studies.simulated_device import NAME, SimulatedDevice, simulated_device

_MICRO_BATCH = 8
_INPUTS, _CLASSES = 8, 4
_WARM_UP = 16  # steps, in which groups are checked
_WARM_UP_BY_HAND = 2  # steps, in which optimizers make their state
_FOREACH_SGD = partial(SGD, lr=0.1, momentum=0.9)  # torch's default on a device

Build = Callable[[Any], Optimizer]


class _Block(nn.Module):
    """A residual block of six parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        narrow: Tensor = self.narrow(torch.relu(self.wide(self.norm(x))))
        return x + narrow


def network() -> nn.Module:
    """Four residual blocks between two linear layers: 28 parameters."""
    torch.manual_seed(0)
    blocks = [_Block(32) for _ in range(4)]
    return nn.Sequential(nn.Linear(_INPUTS, 32), *blocks, nn.Linear(32, _CLASSES))


@dataclass(frozen=True)
class Case:
    """A loop whose step is counted: AdaptiveBatch with these options, or a loop by hand."""

    micro_batches: int
    optimizer: Build = _FOREACH_SGD
    options: Mapping[str, Any] | None = None  # of AdaptiveBatch; None for a loop by hand
    metered: bool = False


CASES: Mapping[str, Case] = {
    "plain SGD": Case(4),
    "plain SGD, k = 1": Case(1),
    "plain SGD, k = 8": Case(8),
    "AdaptiveBatch, not measured": Case(4, options={"every": 0}),
    "AdaptiveBatch, not measured, k = 1": Case(1, options={"every": 0}),
    "the same, fused SGD": Case(1, partial(SGD, lr=0.1, fused=True), options={"every": 0}),
    "AdaptiveBatch, cut, measured": Case(4, options={"every": 1}),
    "AdaptiveBatch, 8 groups, measured": Case(1, options={"every": 1, "groups": 8}),
    "GradientMeter": Case(4, metered=True),
    "VR-SGD": Case(8, partial(VRSGD, lr=0.1)),
    "VR-Momentum": Case(8, partial(VRSGD, lr=0.1, momentum=0.9)),
    "VR-Adam": Case(8, partial(VRAdam, lr=1e-3)),
    "VR-LARS": Case(8, partial(VRLARS, lr=0.1)),
    "VR-LAMB": Case(8, partial(VRLAMB, lr=1e-3)),
}


@dataclass(frozen=True)
class Counts:
    """What one step asked of the device, by names of operations, waits and copies."""

    operations: Counter[str]
    waits: Counter[str]
    copies: Counter[str]
    peak: int  # bytes of the device, of which the step began with `in_use`
    in_use: int


def counts(case: Case) -> Counts:
    """Counts of one step, from its first batch to the batch of the next; earlier ones warm up."""
    device = simulated_device()
    model = network().to(NAME)
    optimizer = case.optimizer(model.parameters())
    is_by_hand = case.options is None
    steps = (_by_hand if is_by_hand else _adaptive)(case, model, optimizer)
    for _ in range(_WARM_UP_BY_HAND if is_by_hand else _WARM_UP):
        next(steps)
    return _counted(device, steps)


def _counted(device: SimulatedDevice, steps: Iterator[None]) -> Counts:
    device.reset()
    in_use = device.in_use()
    next(steps)
    return Counts(device.operations(), device.waits(), device.copies(), device.peak(), in_use)


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs on the host, and labels that depend on them."""
    x = torch.randn(samples, _INPUTS, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss; copies to the device do not wait."""
    x, y = x.to(NAME, non_blocking=True), y.to(NAME, non_blocking=True)
    return cross_entropy(model(x), y)


def _by_hand(case: Case, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Steps of a loop without AdaptiveBatch, with a GradientMeter if the case has one."""
    k, (x, y) = case.micro_batches, _batch(_MICRO_BATCH * case.micro_batches)
    meter = GradientMeter(model) if case.metered else None
    while True:
        for inputs, labels in zip(x.chunk(k), y.chunk(k), strict=True):
            (_loss(model, inputs, labels) / k).backward()  # type: ignore[no-untyped-call]
        if meter is not None:
            meter.read([_MICRO_BATCH] * k)
        optimizer.step()
        optimizer.zero_grad()
        yield


def _adaptive(case: Case, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Steps of AdaptiveBatch; with groups, the whole batch is one micro-batch."""
    assert case.options is not None
    samples = 4 * _MICRO_BATCH
    loader = DataLoader(TensorDataset(*_batch(samples * (_WARM_UP + 2))), _MICRO_BATCH)
    options = {**case.options, "micro_batch": samples // case.micro_batches}
    for step in AdaptiveBatch(model, optimizer, loader, policy=Fixed(samples), **options):
        for x, y in step:
            step.backward(_loss(model, x, y))
        step.update()
        yield


def rows(names: Sequence[str]) -> Iterator[Row]:
    """A row of each case."""
    for name in names:
        found = counts(CASES[name])
        yield {
            "step": name,
            "micro-batches": str(CASES[name].micro_batches),
            "operations": str(found.operations.total()),
            "waits": _listed(found.waits),
            "copies": _listed(found.copies),
            "peak, KiB": f"{(found.peak - found.in_use) / 1024:.0f}",
        }


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "0"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and the operations of a step by name with `--names`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--names", action="store_true", help="a table of operations by name too")
    parser.add_argument("--tiny", action="store_true", help="one case")
    given = parser.parse_args(arguments)
    names = given.cases[:1] if given.tiny else given.cases
    show("a step on the simulated device, 28 parameters; peak above the step's start", rows(names))
    if given.names:
        show("operations of a step by name", _names(names))


def _names(names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        for operation, number in counts(CASES[name]).operations.most_common():
            yield {"step": name, "operation": operation, "number": str(number)}


if __name__ == "__main__":
    main()
