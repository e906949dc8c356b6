"""Random projections of groups of samples, against their exact gradients, while a model trains.

python -m studies.projection_accuracy --seeds 3
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bigbatch.optional_packages import import_optional
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch_recipes.tasks.digit_images import network
from studies.markdown_tables import Row, show

_BATCH, _GROUPS = 64, 8


def run(seeds: int, steps: int) -> Iterator[Row]:
    """Mean and standard deviation of each quantity over all steps of the digits network."""
    values: dict[str, list[float]] = {}
    for seed in range(seeds):
        for projected, exact in _measurements(seed, steps):
            for name, value in (
                ("noise, projected / exact", projected.grad_variance / exact.grad_variance),
                ("similarity, projected - exact", projected.similarity - exact.similarity),
                ("similarity, exact", exact.similarity),
            ):
                values.setdefault(name, []).append(value)
    for name, found in values.items():
        yield {"quantity": name, "mean": f"{fmean(found):.3f}", "sd": f"{stdev(found):.3f}"}


def _measurements(seed: int, steps: int) -> Iterator[tuple[GradientStatistics, GradientStatistics]]:
    """Both statistics of each step of a training."""
    datasets = import_optional("sklearn.datasets", "experiments")
    images, labels = map(torch.tensor, datasets.load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(seed)
    model = network(dropout=0.0)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    # a layer's norms are exact
    with (
        GradientMeter(model, groups=_GROUPS) as projecting,
        GradientMeter(copied, groups=_GROUPS, per_layer=True) as exact,
    ):
        for _ in range(steps):
            batch = torch.randint(len(labels), (_BATCH,))
            copied.load_state_dict(model.state_dict())
            expected = _measured(copied, exact, images[batch], labels[batch])
            yield _measured(model, projecting, images[batch], labels[batch]), expected
            optimizer.step()


def _measured(model: nn.Module, meter: GradientMeter, x: Tensor, y: Tensor) -> GradientStatistics:
    model.zero_grad()
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    statistics = meter.read(samples=[len(y)])
    assert statistics is not None
    return statistics


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings")
    parser.add_argument("--steps", type=int, default=200, help="steps of each")
    parser.add_argument("--tiny", action="store_true", help="two steps of one training")
    given = parser.parse_args(arguments)
    if given.tiny:
        given.seeds, given.steps = 1, 2
    title = f"{_GROUPS} groups of one backward of {_BATCH} samples, digits"
    show(title, run(given.seeds, given.steps))


if __name__ == "__main__":
    main()
