"""What the adaptive loop itself costs: against a plain loop, in Python, in copies, in memory."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.bench.sized_networks import random_batch
from bigbatch.bench.timing import interleaved
from bigbatch.data.batches import Batches
from bigbatch.experiments.digits import network
from bigbatch.experiments.models.resnet import resnet_of_basic_blocks
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch

COLUMNS = ("what", "value", "least and most", "goal")

_K = 8
_NEVER = 10**9  # the first step is due, and is not timed
_MICRO_BATCHES = 1280  # of the tiny network in one timing

_Batches = list[tuple[Tensor, Tensor]]

_IMAGE_MODELS: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
    ("ResNet-18", resnet_of_basic_blocks, (3, 32, 32)),
    ("digits network", network, (1, 8, 8)),
)


def _images(samples: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, *shape), torch.randint(10, (samples,))


@dataclass(frozen=True)
class Measured:
    """A figure and its goal; a row of a table.

    Args:
        what: is measured.
        values: one a round.
        unit: after the numbers.
        goal: not to be exceeded; None for none.
    """

    what: str
    values: list[float]
    unit: str
    goal: float | None = None

    def row(self) -> tuple[str, ...]:
        """For a table under `COLUMNS`."""
        low, high = min(self.values), max(self.values)
        return (
            self.what,
            f"{median(self.values):.3f}{self.unit}",
            f"{low:.3f} to {high:.3f}",
            "" if self.goal is None else f"{self.goal:g}{self.unit}",
        )


ROWS = 15


def costs(rounds: int) -> Iterator[Measured]:
    """Everything that the loop adds."""
    yield from _over_a_plain_loop(rounds)
    yield from _over_one_backward(rounds)
    yield from _in_python(rounds)
    yield from _of_cutting()
    yield from _of_sizes(rounds)


def _over_a_plain_loop(rounds: int) -> Iterator[Measured]:
    """Seconds of a ResNet-18 step in the loop, over those of the same plain loop."""
    model = resnet_of_basic_blocks()
    batches = [random_batch(model, 8, 32) for _ in range(_K)]
    adaptive = [_adaptive(model, batches, every, _K) for every in (_NEVER, 1)]
    runs = [_plain(model, batches, _K), *adaptive]
    times = interleaved(runs, rounds)
    for number, kind in enumerate(("not measured", "measured"), start=1):
        ratios = [row[number] / row[0] for row in times]
        goal = 1.01 if number == 1 else None
        yield Measured(f"ResNet-18, k = {_K} x 8, {kind}: step / plain step", ratios, "", goal)


def _over_one_backward(rounds: int) -> Iterator[Measured]:
    """Seconds of a measured step, over those of a plain loop that does not accumulate."""
    for what, build, shape in _IMAGE_MODELS:
        model, cut = build(), [_images(16, shape) for _ in range(16)]
        whole = [
            (torch.cat([x for x, _ in four]), torch.cat([y for _, y in four]))
            for four in zip(*[iter(cut)] * 4, strict=True)
        ]
        times = interleaved([_plain(model, whole, 1), _adaptive(model, cut, 1, 4)], rounds)
        name = f"{what}, 64 samples as 4 x 16, measured: step / plain step of 1 x 64"
        yield Measured(name, [row[1] / row[0] for row in times], "")


def _in_python(rounds: int) -> Iterator[Measured]:
    """Microseconds that a network too small to matter takes longer in the loop.

    Each micro-batch bears its k-th part of what a step costs in addition to its micro-batches.
    """
    model = nn.Linear(4, 3)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(_MICRO_BATCHES)]
    for every, kind in ((_NEVER, "not measured"), (1, "measured")):
        for k in (64, 8):
            runs = [_plain(model, batches, k), _adaptive(model, batches, every, k)]
            extra = [1e6 * (row[1] - row[0]) / len(batches) for row in interleaved(runs, rounds)]
            goal = 50.0 if (every, k) == (_NEVER, 64) else None
            yield Measured(f"Python a micro-batch, k = {k}, {kind}", extra, " us", goal)


def _plain(model: nn.Module, batches: _Batches, k: int) -> Callable[[], None]:
    model = copy.deepcopy(model)  # one that nobody puts hooks on
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for start in range(0, len(batches), k):
            for x, y in batches[start : start + k]:
                loss = functional.cross_entropy(model(x), y)
                (loss / k).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return run


def _adaptive(model: nn.Module, batches: _Batches, every: int, k: int) -> Callable[[], None]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = len(batches[0][0])
    train = AdaptiveBatch(
        model,
        optimizer,
        batches,
        policy=Fixed(k * samples),
        micro_batch=samples,
        min_micro_batches=k,
        meter=GradientMeter(model, every=every),
    )
    if every == _NEVER:
        train.meter.next_step()

    def run() -> None:
        for step in train:
            for x, y in step:
                step.backward(functional.cross_entropy(model(x), y))
            step.update()

    return run


def _of_sizes(rounds: int) -> Iterator[Measured]:
    """Seconds of micro-batches whose sizes change, over those of as many samples in equal ones."""
    sizes = {"equal": [32] * 4, "changing": [29, 35, 31, 33]}
    for name, compiled in (("eager", False), ("compiled", True)):
        for what, build, shape in _IMAGE_MODELS:
            if compiled and (what == "ResNet-18" or shutil.which("c++") is None):
                continue  # takes minutes, or cannot be
            model = build()
            called = torch.compile(model) if compiled else model
            runs = [
                _forward_backward(called, model, [_images(n, shape) for n in each])
                for each in sizes.values()
            ]
            times = interleaved(runs, rounds)
            ratios = [row[1] / row[0] for row in times]
            yield Measured(f"{what}, {name}: changing sizes / equal sizes", ratios, "")


def _forward_backward(
    called: Callable[[Tensor], Tensor], model: nn.Module, batches: _Batches
) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        for x, y in batches:
            functional.cross_entropy(called(x), y).backward()  # type: ignore[no-untyped-call]

    return run


def _of_cutting() -> Iterator[Measured]:
    """Samples that were copied, over all; samples in waiting, over a loader's batch."""
    for samples, micro in ((64, 64), (64, 48), (64, 200)):
        copied, waiting = _cut(DataLoader(TensorDataset(torch.randn(6400, 4)), samples), micro)
        what = f"loader's batch {samples}, micro-batch {micro}"
        if micro != samples:
            yield Measured(f"{what}: input copied", [copied], " x", 1.0)
        if micro >= samples:
            bound = 1 + micro / samples
            yield Measured(f"{what}: in waiting, in loader's batches", [waiting], "", bound)


def _cut(loader: DataLoader[tuple[Tensor, ...]], micro: int) -> tuple[float, float]:
    """(share of the samples that were copied, most loader's batches in waiting)."""
    fetched: list[Tensor] = []

    class Watched:
        """The loader, with a list of what it gave."""

        def __iter__(self) -> Iterator[Tensor]:
            for (batch,) in loader:
                fetched.append(batch)
                yield batch

    batches = Batches(Watched())
    batches.start(0)
    size = loader.batch_size or 1
    given = copied = most = 0
    while (micro_batches := batches.step(BatchPlan(1, micro, 4), min_batch=1)) is not None:
        for micro_batch, samples, _ in micro_batches:
            given += samples
            most = max(most, size * len(fetched) - given)
            known = {batch.untyped_storage().data_ptr() for batch in fetched}
            copied += samples * (micro_batch.untyped_storage().data_ptr() not in known)
    return copied / given, most / size
