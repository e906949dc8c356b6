"""What a user pays for the loop: its steps over those of a plain loop with one backward a step."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.bench.sized_networks import MicroBatches, TiedTransformer, small_cnn, with_group_norm
from bigbatch.bench.timing import Row, interleaved_times, median_and_range
from bigbatch.experiments.digits import network
from bigbatch.experiments.models.resnet import resnet_of_basic_blocks
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch

BATCHES = (32, 128)  # by default

_NEVER = 10**9  # interval of a meter that measures its first step alone, which is not timed


@dataclass(frozen=True)
class Network:
    """A network and what it is trained on.

    Args:
        build: builds the network.
        shape: shape of an image, or the length of a sequence.
        steps: steps of one timing.
        tokens: size of the vocabulary; 0 for images.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int
    tokens: int = 0

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        if self.tokens:
            tokens = torch.randint(self.tokens, (samples, *self.shape))
            return tokens, tokens.roll(-1, 1)
        return torch.randn(samples, *self.shape), torch.randint(10, (samples,))


NETWORKS = {
    "digits network": Network(network, (1, 8, 8), 64),
    "small CNN": Network(small_cnn, (3, 32, 32), 8),
    "ResNet-18": Network(resnet_of_basic_blocks, (3, 32, 32), 1),
    "ResNet-18, GroupNorm": Network(
        lambda: with_group_norm(resnet_of_basic_blocks()), (3, 32, 32), 1
    ),
    "transformer, 1 x 512": Network(lambda: TiedTransformer(1, 512, 4096), (32,), 2, 4096),
    "transformer, 6 x 256": Network(lambda: TiedTransformer(6, 256, 1024), (32,), 2, 1024),
    "transformer, 6 x 64": Network(lambda: TiedTransformer(6, 64, 256), (16,), 8, 256),
}

# options of AdaptiveBatch, each a column of the table
WAYS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "not measured": lambda model: {"meter": GradientMeter(model, every=_NEVER)},
    "default": lambda model: {},
}


def rows(names: Sequence[str], batches: Sequence[int], rounds: int) -> Iterator[Row]:
    """A row for each network and batch size: every way's step over the plain one."""
    for name in names:
        for batch in batches:
            yield _row(name, batch, rounds)


def _row(name: str, samples: int, rounds: int) -> Row:
    shape = NETWORKS[name]
    model, batches = shape.build(), [shape.batch(samples) for _ in range(shape.steps)]
    runs = [_plain(model, batches), *(_loop(model, batches, way) for way in WAYS.values())]
    times = interleaved_times(runs, rounds)
    plain = [1e3 * row[0].wall / shape.steps for row in times]
    row = {"network": name, "batch": str(samples), "plain step, ms": median_and_range(plain)}
    for number, way in enumerate(WAYS, start=1):
        row[way] = median_and_range([one[number].wall / one[0].wall for one in times], digits=3)
        row[f"{way}, CPU"] = median_and_range(
            [one[number].cpu / one[0].cpu for one in times], digits=3
        )
    return row


def _plain(model: nn.Module, batches: MicroBatches) -> Callable[[], None]:
    """One backward a step."""
    model = copy.deepcopy(model)  # without the hooks of a meter
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for x, y in batches:
            _loss(model, x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return run


def _loop(
    model: nn.Module, batches: MicroBatches, way: Callable[[nn.Module], dict[str, Any]]
) -> Callable[[], None]:
    """Steps of the same batches in the adaptive loop; the first pass is not timed."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = len(batches[0][0])
    train = AdaptiveBatch(
        model, optimizer, batches, policy=Fixed(samples), micro_batch=samples, **way(model)
    )

    def run() -> None:
        for step in train:
            for x, y in step:
                step.backward(_loss(model, x, y))
            step.update()

    return run


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y.flatten())
