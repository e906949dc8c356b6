"""Python calls of a step, and the functions and files of the library that it enters.

python -m studies.python_calls
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import bigbatch as bb
from bigbatch.optim import VRSGD
from studies.markdown_tables import Row, show

_WARM_UP, _COUNTED = 80, 16  # steps; the first ones of a loop look closer
_TENSORS, _MICRO_BATCHES, _ELEMENTS = 100, 8, 64
_LIBRARY = str(Path(bb.__file__).parent)
_RATE = 1e-9
_README = "README network, 1 micro-batch"
_MANY = f"{_TENSORS} tensors, {_MICRO_BATCHES} micro-batches"

WAYS: dict[str, dict[str, Any]] = {  # options of AdaptiveBatch on the README's network
    "not measured": {"every": 0},
    "8 groups, every step": {"every": 1, "groups": 8},
    "cut, every step": {"every": 1},
}


@dataclass
class Calls:
    """What `sys.setprofile` reports of a run."""

    calls: int = 0  # of Python's and C's functions
    entered: set[tuple[str, int]] = field(default_factory=set)  # (file, line) of its functions

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Counts an event."""
        if event == "c_call":
            self.calls += 1
        elif event == "call":
            self.calls += 1
            code = frame.f_code
            if code.co_filename.startswith(_LIBRARY):
                self.entered.add((code.co_filename, code.co_firstlineno))

    @property
    def files(self) -> int:
        """Files of the library that the run entered."""
        return len({file for file, _ in self.entered})


def counted(steps: Iterator[None]) -> Calls:
    """The calls of 16 steps, after those in which a loop looks closer."""
    for _ in range(_WARM_UP):
        next(steps)
    calls = Calls()
    sys.setprofile(calls)
    try:
        for _ in range(_COUNTED):
            next(steps)
    finally:
        sys.setprofile(None)
    return calls


def readme_steps(options: dict[str, Any] | None) -> Iterator[None]:
    """Steps of the README's network; without options by hand, one backward a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    data = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(_WARM_UP + 2 * _COUNTED)]
    optimizer = SGD(model.parameters(), lr=_RATE)
    if options is None:
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield
        return
    policy = bb.Fixed(32)
    train = bb.AdaptiveBatch(model, optimizer, data, policy=policy, micro_batch=32, **options)
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        step.update()
        yield


def many_tensors(kind: str) -> Iterator[None]:
    """Steps of 8 micro-batches over 100 tensors of 64 elements."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(_ELEMENTS)) for _ in range(_TENSORS)]
    build: Callable[..., Optimizer] = VRSGD if kind == "VR-SGD" else SGD
    optimizer = build(parameters, lr=_RATE)
    meter = bb.GradientMeter(parameters) if kind == "GradientMeter" else None
    while True:
        optimizer.zero_grad()
        for _ in range(_MICRO_BATCHES):
            torch.stack([p.dot(p) for p in parameters]).sum().backward()  # type: ignore[no-untyped-call]
        if meter is not None:
            meter.read([1] * _MICRO_BATCHES)
        optimizer.step()
        yield


def rows(*, tiny: bool) -> Iterator[Row]:
    """One row for each kind of step; only those of one backward if tiny."""
    plain = counted(readme_steps(None))
    yield _row(_README, "plain", plain, plain)
    for way, options in WAYS.items():
        yield _row(_README, way, counted(readme_steps(options)), plain)
    if tiny:
        return
    plain = counted(many_tensors("plain"))
    for kind in ("plain", "VR-SGD", "GradientMeter"):
        yield _row(_MANY, kind, counted(many_tensors(kind)), plain)


def _row(network: str, step: str, calls: Calls, plain: Calls) -> Row:
    return {
        "network": network,
        "step": step,
        "calls": f"{calls.calls / _COUNTED:.0f}",
        "beyond plain": f"{(calls.calls - plain.calls) / _COUNTED:.0f}",
        "functions of the library": str(len(calls.entered)),
        "its files": str(calls.files),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="only steps of one backward")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    show("calls of a step", rows(tiny=given.tiny))


if __name__ == "__main__":
    main()
