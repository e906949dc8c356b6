"""The cost of measuring: time of a step over the same step without, and over what must be read.

python -m studies.measure_cost --rounds 7 --device cpu
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from bigbatch.gradients import SingleProcessSource
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.second_moment import GradientMoments
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies.markdown_tables import Row, show
from studies.sized_networks import GPT, MicroBatches, count, mean_loss, random_batch, wide_layers
from studies.timing import interleaved

_K = 8


@dataclass(frozen=True)
class Shape:
    """A network, samples of a micro-batch, and the length of a sequence or side of an image."""

    name: str
    build: Callable[[], nn.Module]
    samples: int
    length: int


SHAPES = [
    Shape("ResNet-18, 8 images", resnet_of_basic_blocks, 8, 32),
    Shape("ResNet-18, 32 images", resnet_of_basic_blocks, 32, 32),
    Shape("GPT, T = 8 x 128", lambda: GPT(6, 512, 256, 128), 8, 128),
    *(Shape(f"linear layers, T = {t}", wide_layers, t, 1) for t in (8, 32, 128, 512, 2048)),
]


def shape_rows(shape: Shape, rounds: int, device: str = "cpu") -> Iterator[Row]:
    """Time of a step of k = 8 micro-batches with each measurement over the step without.

    The kinds are nothing (one plain step over the other), similarity, interval, second moment. All
    are timed on one network, between two plain steps, whose mean is the baseline. The floor is the
    ratio that memory bandwidth allows.
    """
    torch.manual_seed(0)
    model = shape.build()
    host_batches = [random_batch(model, shape.samples, shape.length) for _ in range(_K)]
    batches = [(x.to(device), y.to(device)) for x, y in host_batches]
    model.to(device)

    def plain() -> None:
        _accumulate(model, batches)

    runs: list[Callable[[], None]] = [
        plain,
        _metered(model, batches, None),
        _metered(model, batches, 0.9),
        _with_moments(model, batches),
        plain,
        lambda: _read(model),
        lambda: _add_in_place(model),
    ]
    rows = [[times.wall for times in row] for row in interleaved(runs, rounds)]
    means = [(row[0] + row[4]) / 2 for row in rows]
    read, add = (
        median(row[i] / base for row, base in zip(rows, means, strict=True)) for i in (5, 6)
    )
    kinds = [
        ("nothing", 0, [row[4] for row in rows], 1.0),
        ("similarity", 1, means, 1 + read),
        ("similarity and interval", 2, means, 1 + 2 * read),
        # 20 bytes a weight, of which add_ moves 8
        ("second moment", 3, means, 1 + 20 / 8 * add),
    ]
    for kind, number, baseline, floor in kinds:
        ratios = [row[number] / base for row, base in zip(rows, baseline, strict=True)]
        yield {
            "what": f"{shape.name}, {count(model) / 1e6:.1f} M: {kind}",
            "ratio": f"{median(ratios):.3f}",
            "least and most": f"{min(ratios):.3f} to {max(ratios):.3f}",
            "floor": f"{floor:.3f}",
            "ratio / floor": f"{median(ratios) / floor:.2f}",
        }


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


def _with_moments(model: nn.Module, batches: MicroBatches) -> Callable[[], None]:
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
        (mean_loss(model, x, y) / _K).backward()  # type: ignore[no-untyped-call]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each ratio")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tiny", action="store_true", help="one round of one small network")
    given = parser.parse_args(arguments)
    small = Shape("GPT of one layer", lambda: GPT(1, 64, 256, 8), 2, 8)
    rounds, shapes = (1, [small]) if given.tiny else (given.rounds, SHAPES)
    title = f"a step with / without; median of {rounds} interleaved rounds"
    show(title, (row for shape in shapes for row in shape_rows(shape, rounds, given.device)))


if __name__ == "__main__":
    main()
