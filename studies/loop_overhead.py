"""What a user pays for the loop: its steps over those of a plain loop with one backward a step."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from bigbatch.errors import GradientError
from bigbatch.optim.vr_optimizers import VRSGD
from bigbatch.policies.policy import Fixed
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.loop_options import LoopOptions
from bigbatch_recipes.digits import network
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from studies.loop_cost import plain_loop
from studies.sized_networks import (
    MicroBatches,
    TiedTransformer,
    mean_loss,
    small_cnn,
    with_group_norm,
)
from studies.timing import Row, Times, interleaved_times, median_and_range

BATCHES = (32, 128)  # by default

_WARM_UP = 16  # steps, in which the default times what measuring costs, and groups are checked
_MAX_STEPS = 256  # of a way, in all rounds


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

# optimizer and options of AdaptiveBatch, each a column of the table
WAYS: dict[str, tuple[Callable[..., Optimizer], LoopOptions]] = {
    "not measured": (SGD, {"budget": 0.0}),
    "default": (SGD, {}),
    "groups, every step": (SGD, {"budget": None, "groups": 8}),
    "cut, every step": (SGD, {"budget": None}),
    "VRSGD, groups": (VRSGD, {"groups": 8}),
    "VRSGD, cut": (VRSGD, {}),
}


def rows(names: Sequence[str], batches: Sequence[int], rounds: int) -> Iterator[Row]:
    """A row for each network and batch size: every way's step over the plain one."""
    for name in names:
        for batch in batches:
            yield _row(name, batch, rounds)


def _row(name: str, samples: int, rounds: int) -> Row:
    shape = NETWORKS[name]
    model, batches = shape.build(), [shape.batch(samples) for _ in range(shape.steps)]
    warm = {way: _warm_loop(model, batches, *options) for way, options in WAYS.items()}
    loops = {way: loop for way, loop in warm.items() if loop is not None}
    # so many passes that the default's measured steps have their share, in all rounds together
    steps = min(_MAX_STEPS, 2 * max(loop.every or 0 for loop in loops.values()))
    passes = max(1, -(-steps // (rounds * shape.steps)))
    runs: list[Callable[[], None]] = [plain_loop(model, batches, 1)]
    runs += [partial(_run, loop) for loop in loops.values()]
    times = interleaved_times([repeated(run, passes) for run in runs], rounds)
    plain = [1e3 * row[0].wall / shape.steps / passes for row in times]
    row = {"network": name, "batch": str(samples), "plain step, ms": median_and_range(plain)}
    for way in WAYS:
        row[way] = "refused"
        if way in loops:
            number = 1 + list(loops).index(way)
            row[way] = ratio_of_rounds([(one[number], one[0]) for one in times])
    return row


def ratio_of_rounds(pairs: Sequence[tuple[Times, Times]]) -> str:
    """The ratio of the sums of all rounds, with the least and the most of a round; that of CPU."""
    ratios = [time.wall / plain.wall for time, plain in pairs]
    wall = sum(time.wall for time, _ in pairs) / sum(plain.wall for _, plain in pairs)
    cpu = sum(time.cpu for time, _ in pairs) / sum(plain.cpu for _, plain in pairs)
    return f"{wall:.3f} [{min(ratios):.2f}, {max(ratios):.2f}], CPU {cpu:.3f}"


def repeated(run: Callable[[], None], times: int) -> Callable[[], None]:
    """So many runs as one."""

    def run_all() -> None:
        for _ in range(times):
            run()

    return run_all


def _warm_loop(
    model: nn.Module,
    batches: MicroBatches,
    build_optimizer: Callable[..., Optimizer],
    options: LoopOptions,
) -> AdaptiveBatch | None:
    """A loop over these batches that knows what measuring costs; None if groups are refused."""
    model = copy.deepcopy(model)
    optimizer = build_optimizer(model.parameters(), lr=1e-4)
    samples = len(batches[0][0])
    train = AdaptiveBatch(
        model, optimizer, batches, policy=Fixed(samples), **options | {"micro_batch": samples}
    )
    try:
        while train.steps < _WARM_UP:
            _run(train)
    except GradientError:
        return None
    return train


def _run(train: AdaptiveBatch) -> None:
    """One pass over the batches."""
    for step in train:
        for x, y in step:
            step.backward(mean_loss(train.model, x, y))
        step.update()
