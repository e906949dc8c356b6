"""What a user pays for the loop: its steps over those of a plain loop with one backward a step.

python -m studies.overhead --networks "digits network" "small CNN" --batches 32 128
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

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
from studies.markdown_tables import Row, show
from studies.sized_networks import GPT, MicroBatches, mean_loss, small_cnn, with_group_norm
from studies.timing import Times, interleaved, median_and_range

_WARM_UP = 16  # steps, in which the default times what measuring costs, and groups are checked
_MAX_STEPS = 256  # of a way, in all rounds
_MICRO_BATCHES = 1280  # of the tiny network in one timing


@dataclass(frozen=True)
class Network:
    """A network and what it is trained on."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an image, or the length of a sequence
    steps: int  # of one timing
    tokens: int = 0  # size of the vocabulary; 0 for images

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
    "GPT, 1 x 512": Network(lambda: GPT(1, 512, 4096, 32), (32,), 2, 4096),
    "GPT, 6 x 256": Network(lambda: GPT(6, 256, 1024, 32), (32,), 2, 1024),
    "GPT, 6 x 64": Network(lambda: GPT(6, 64, 256, 16), (16,), 8, 256),
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


def rows(
    names: Sequence[str], batches: Sequence[int], rounds: int, most_steps: int = _MAX_STEPS
) -> Iterator[Row]:
    """A row for each network and batch size: every way's step over the plain one."""
    for name in names:
        for samples in batches:
            cells = _cells(NETWORKS[name], samples, rounds, most_steps)
            yield {"network": name, "batch": str(samples), **cells}


def _cells(shape: Network, samples: int, rounds: int, most_steps: int) -> Row:
    model, batches = shape.build(), [shape.batch(samples) for _ in range(shape.steps)]
    warm = {way: _warm_loop(model, batches, *options) for way, options in WAYS.items()}
    loops = {way: loop for way, loop in warm.items() if loop is not None}
    # so many passes that the default's measured steps have their share, in all rounds together
    steps = min(most_steps, 2 * max(loop.every or 0 for loop in loops.values()))
    passes = max(1, -(-steps // (rounds * shape.steps)))
    runs = [_plain_loop(model, batches, 1)]
    runs += [partial(_run, loop) for loop in loops.values()]
    times = interleaved([partial(_repeat, run, passes) for run in runs], rounds)
    plain = [1e3 * row[0].wall / shape.steps / passes for row in times]
    ratios = {
        way: _ratio_of_rounds([(row[number], row[0]) for row in times])
        for number, way in enumerate(loops, start=1)
    }
    return {
        "plain step, ms": median_and_range(plain),
        **{way: ratios.get(way, "refused") for way in WAYS},
    }


def _ratio_of_rounds(pairs: Sequence[tuple[Times, Times]]) -> str:
    """The ratio of the sums of all rounds, with the least and the most of a round; that of CPU."""
    ratios = [time.wall / plain.wall for time, plain in pairs]
    wall = sum(time.wall for time, _ in pairs) / sum(plain.wall for _, plain in pairs)
    cpu = sum(time.cpu for time, _ in pairs) / sum(plain.cpu for _, plain in pairs)
    return f"{wall:.3f} [{min(ratios):.2f}, {max(ratios):.2f}], CPU {cpu:.3f}"


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def _warm_loop(
    model: nn.Module,
    batches: MicroBatches,
    build_optimizer: Callable[..., Optimizer],
    options: LoopOptions,
) -> AdaptiveBatch | None:
    """A loop over these batches that knows what measuring costs; None if groups are refused."""
    model, samples = copy.deepcopy(model), len(batches[0][0])
    optimizer = build_optimizer(model.parameters(), lr=1e-4)
    options = options | {"micro_batch": samples}
    train = AdaptiveBatch(model, optimizer, batches, policy=Fixed(samples), **options)
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


def _plain_loop(model: nn.Module, batches: MicroBatches, k: int) -> Callable[[], None]:
    """Steps of k batches with SGD, in a loop without the library."""
    model = copy.deepcopy(model)  # without the hooks of a meter
    optimizer = SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for start in range(0, len(batches), k):
            for x, y in batches[start : start + k]:
                (mean_loss(model, x, y) / k).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return run


def python_rows(rounds: int, count: int = _MICRO_BATCHES) -> Iterator[Row]:
    """Microseconds that the loop adds to a micro-batch of a tiny network.

    A step's fixed overhead is divided by its k micro-batches.
    """
    model = nn.Linear(4, 3)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(count)]
    for kind, budget in (("not measured", 0.0), ("measured", None)):
        for k in (64, 8):
            copied = copy.deepcopy(model)
            loop = AdaptiveBatch(
                copied,
                SGD(copied.parameters(), lr=1e-4),
                batches,
                policy=Fixed(8 * k),
                micro_batch=8,
                min_micro_batches=k,
                budget=budget,
            )
            times = interleaved((_plain_loop(model, batches, k), partial(_run, loop)), rounds)
            extra = [1e6 * (ours.wall - plain.wall) / count for plain, ours in times]
            goal = "50" if (kind, k) == ("not measured", 64) else ""
            yield {
                "loop": f"{kind}, k = {k}",
                "Python a micro-batch, us": f"{median(extra):.1f}",
                "least and most": f"{min(extra):.1f} to {max(extra):.1f}",
                "goal": goal,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each ratio")
    parser.add_argument("--tiny", action="store_true", help="one round of one small network")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.networks, given.batches, given.rounds = ["GPT, 6 x 64"], [4], 1
    title = f"step / plain step of one backward; all rounds [least, most of {given.rounds}]"
    most_steps, micro_batches = (1, 64) if given.tiny else (_MAX_STEPS, _MICRO_BATCHES)
    show(title, rows(given.networks, given.batches, given.rounds, most_steps))
    show("what the loop adds", python_rows(given.rounds, micro_batches))


if __name__ == "__main__":
    main()
