"""The overhead of the adaptive loop: time over a plain loop, Python, copies, waiting samples."""

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bigbatch.data.batches import Batches
from bigbatch.policies.plan import BatchPlan
from bigbatch.policies.policy import Fixed
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.digits import network
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies.sized_networks import MicroBatches, mean_loss, random_batch
from studies.timing import Row, interleaved

ROWS = 13

_ACCUMULATION = 8  # micro-batches of a step
_MICRO_BATCHES = 1280  # micro-batches of the tiny network in one timing
# budgets, and what they are called in the table
_KINDS: tuple[tuple[float | None, str], ...] = ((0.0, "not measured"), (None, "measured"))

_IMAGE_MODELS: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
    ("ResNet-18", resnet_of_basic_blocks, (3, 32, 32)),
    ("digits network", network, (1, 8, 8)),
)


def _images(samples: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, *shape), torch.randint(10, (samples,))


def costs(rounds: int) -> Iterator[Row]:
    """All costs that the loop adds, one row each."""
    yield from _plain_loop_ratios(rounds)
    yield from _python_overhead(rounds)
    yield from _copies_and_waiting()
    yield from _changing_size_ratios(rounds)


def _row(what: str, values: list[float], unit: str = "", goal: float | None = None) -> Row:
    """The row of the table.

    Args:
        what: the measured quantity.
        values: one per round.
        unit: the text after each number.
        goal: the largest value that is acceptable; None for none.
    """
    return {
        "what": what,
        "value": f"{median(values):.3f}{unit}",
        "least and most": f"{min(values):.3f} to {max(values):.3f}",
        "goal": "" if goal is None else f"{goal:g}{unit}",
    }


def _plain_loop_ratios(rounds: int) -> Iterator[Row]:
    """Time of a ResNet-18 step in the adaptive loop over the same step in a plain loop."""
    model, k = resnet_of_basic_blocks(), _ACCUMULATION
    batches = [random_batch(model, 8, 32) for _ in range(k)]
    adaptive = [_adaptive(model, batches, budget, k) for budget, _ in _KINDS]
    times = interleaved([plain_loop(model, batches, k), *adaptive], rounds)
    for number, (_, kind) in enumerate(_KINDS, start=1):
        ratios = [row[number] / row[0] for row in times]
        goal = 1.01 if number == 1 else None
        yield _row(f"ResNet-18, k = {k} x 8, {kind}: step / plain step", ratios, goal=goal)


def _python_overhead(rounds: int) -> Iterator[Row]:
    """Microseconds that the loop adds to a micro-batch of a tiny network.

    A step's fixed overhead is divided by its k micro-batches.
    """
    model = nn.Linear(4, 3)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(_MICRO_BATCHES)]
    for budget, kind in _KINDS:
        for k in (64, 8):
            runs = [plain_loop(model, batches, k), _adaptive(model, batches, budget, k)]
            times = interleaved(runs, rounds)
            extra = [1e6 * (adaptive - plain) / len(batches) for plain, adaptive in times]
            goal = 50.0 if (budget, k) == (0, 64) else None
            yield _row(f"Python a micro-batch, k = {k}, {kind}", extra, " us", goal)


def plain_loop(model: nn.Module, batches: MicroBatches, k: int) -> Callable[[], None]:
    """Steps of k batches with SGD, in a loop without the library."""
    model = copy.deepcopy(model)  # without the hooks of a meter
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return partial(plain_steps, model, optimizer, batches, k)


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: MicroBatches, k: int
) -> None:
    """Steps of k batches in a loop without the library."""
    for start in range(0, len(batches), k):
        for x, y in batches[start : start + k]:
            loss = mean_loss(model, x, y)
            (loss / k if k > 1 else loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _adaptive(
    model: nn.Module, batches: MicroBatches, budget: float | None, k: int
) -> Callable[[], None]:
    """Steps of k batches in the adaptive loop.

    Args:
        model: the model, which is copied.
        batches: batches of equal size.
        budget: largest share of the time that measuring takes; None measures every step.
        k: batches of a step; a measured step has at least as many micro-batches.
    """
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
        budget=budget,
    )

    def run() -> None:
        for step in train:
            for x, y in step:
                step.backward(mean_loss(model, x, y))
            step.update()

    return run


def _changing_size_ratios(rounds: int) -> Iterator[Row]:
    """Time of micro-batches of changing sizes over as many samples in equal micro-batches."""
    equal_sizes, changing_sizes = [32] * 4, [29, 35, 31, 33]
    for mode, compiled in (("eager", False), ("compiled", True)):
        for name, build, shape in _IMAGE_MODELS:
            if compiled and (name == "ResNet-18" or shutil.which("c++") is None):
                continue  # takes minutes, or has no compiler
            model = build()
            forward = torch.compile(model) if compiled else model
            runs = [
                _forward_backward(forward, model, [_images(n, shape) for n in sizes])
                for sizes in (equal_sizes, changing_sizes)
            ]
            ratios = [changing / equal for equal, changing in interleaved(runs, rounds)]
            yield _row(f"{name}, {mode}: changing sizes / equal sizes", ratios)


def _forward_backward(
    forward: Callable[[Tensor], Tensor], model: nn.Module, batches: MicroBatches
) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        for x, y in batches:
            mean_loss(forward, x, y).backward()  # type: ignore[no-untyped-call]

    return run


def _copies_and_waiting() -> Iterator[Row]:
    """Share of the samples that are copied, and most samples that wait, in loader's batches."""
    for samples, micro in ((64, 64), (64, 48), (64, 200)):
        loader = DataLoader(TensorDataset(torch.randn(6400, 4)), samples)
        copied, waiting = _count_copies_and_waiting(loader, micro)
        sizes = f"loader's batch {samples}, micro-batch {micro}"
        if micro != samples:
            yield _row(f"{sizes}: input copied", [copied], " x", 1.0)
        if micro >= samples:
            goal = 1 + micro / samples
            yield _row(f"{sizes}: in waiting, in loader's batches", [waiting], goal=goal)


def _count_copies_and_waiting(
    loader: DataLoader[tuple[Tensor, ...]], micro: int
) -> tuple[float, float]:
    """(share of the samples that were copied, most loader's batches that waited)."""
    fetched: list[Tensor] = []

    class RecordingLoader:
        def __iter__(self) -> Iterator[Tensor]:
            for (batch,) in loader:
                fetched.append(batch)
                yield batch

    batches = Batches(RecordingLoader())
    batches.start(0)
    size = loader.batch_size or 1
    consumed = copied = max_waiting = 0
    while (micro_batches := batches.step(BatchPlan(1, micro, 4), min_batch=1)) is not None:
        for micro_batch, samples, _ in micro_batches:
            consumed += samples
            max_waiting = max(max_waiting, size * len(fetched) - consumed)
            storages = {batch.untyped_storage().data_ptr() for batch in fetched}
            copied += samples * (micro_batch.untyped_storage().data_ptr() not in storages)
    return copied / consumed, max_waiting / size
