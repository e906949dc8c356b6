"""Whether a long run keeps its memory and its time per step: both of each thousand steps.

OMP_NUM_THREADS=1 python -m studies.long_run
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.optim import VRSGD
from bigbatch.policies.policy import Shadow, SimiGrad
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from studies.markdown_tables import Row, show
from studies.sized_networks import readme_network

_INPUTS, _CLASSES = 64, 10
_BATCH = 32
_SAMPLES = 64 * _BATCH  # of a pass
_MICRO_BATCHES = 8  # of a step by hand


def _network() -> nn.Module:
    torch.manual_seed(0)
    return readme_network(_INPUTS)


def _samples() -> TensorDataset:
    """Inputs, and labels that depend on them and are wrong in three of ten cases."""
    torch.manual_seed(1)
    x, wrong = torch.randn(_SAMPLES, _INPUTS), torch.rand(_SAMPLES) < 0.3
    y = torch.where(wrong, torch.randint(_CLASSES, (_SAMPLES,)), x[:, :_CLASSES].argmax(1))
    return TensorDataset(x, y)


def _adaptive(**options: Any) -> Iterator[None]:
    """Steps of AdaptiveBatch; decisions are made, and change no batch."""
    model = _network()
    loader = DataLoader(_samples(), _BATCH, shuffle=True)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = AdaptiveBatch(model, optimizer, loader, policy=Shadow(SimiGrad()), **options)
    while True:
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            step.update()
            yield


def _micro_batches() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step of a loop by hand, without end."""
    x, y = _samples().tensors
    while True:
        for inputs, labels in zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True):
            parts = inputs.chunk(_MICRO_BATCHES), labels.chunk(_MICRO_BATCHES)
            yield list(zip(*parts, strict=True))


def _backward(model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, y in micro_batches:
        loss = cross_entropy(model(x), y) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]


def _variance_reduced() -> Iterator[None]:
    model = _network()
    optimizer = VRSGD(model.parameters(), lr=0.05, momentum=0.9)
    for micro_batches in _micro_batches():
        _backward(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        yield


def _metered() -> Iterator[None]:
    model = _network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    meter = GradientMeter(model)
    for micro_batches in _micro_batches():
        _backward(model, micro_batches)
        meter.read([len(x) for x, _ in micro_batches])
        optimizer.step()
        optimizer.zero_grad()
        yield


LOOPS: Mapping[str, Callable[[], Iterator[None]]] = {
    "AdaptiveBatch, default": _adaptive,
    "AdaptiveBatch, every=1, 8 groups": partial(_adaptive, every=1, groups=8),
    "VRSGD, 8 micro-batches": _variance_reduced,
    "GradientMeter, 8 micro-batches": _metered,
}


def _resident_kib() -> int:
    """Memory of this process, from Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 1024


def _rows(name: str, steps: int, of_a_row: int) -> Iterator[Row]:
    """A row for each part of the run."""
    loop = LOOPS[name]()
    for end in range(of_a_row, steps + 1, of_a_row):
        before = time.process_time()
        for _ in range(of_a_row):
            next(loop)
        microseconds = 1e6 * (time.process_time() - before) / of_a_row
        gc.collect()
        yield {
            "steps": f"{end:,}",
            "resident, KiB": f"{_resident_kib():,}",
            "objects": f"{len(gc.get_objects()):,}",
            "CPU us a step": f"{microseconds:.0f}",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), metavar="LOOP")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tiny", action="store_true", help="twenty steps")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.loops:
        steps, of_a_row = (20, 10) if given.tiny else (given.steps, 1000)
        show(name, _rows(name, steps, of_a_row))


if __name__ == "__main__":
    main()
