"""Accuracy of the groups' random projections: `python docs/groups/accuracy.py`, for docs/groups.md.

A training of the digits network; each step is measured exactly and by projections, on one batch.
"""

import copy
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.experiments.digits import network
from bigbatch.statistics.noise_scale import GradientStatistics

STEPS, BATCH = 200, 64


def main() -> None:
    """Prints mean and standard deviation over three seeds of 200 steps."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    ratios, differences, similarities = [], [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = network(dropout=0.0)
        exact_model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        projecting = bb.GradientMeter(model, groups=8)
        exact = bb.GradientMeter(exact_model, groups=8, per_layer=True)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,))
            exact_model.load_state_dict(model.state_dict())
            true = _measured(exact_model, exact, images[batch], labels[batch])
            seen = _measured(model, projecting, images[batch], labels[batch])
            ratios.append(seen.grad_variance / true.grad_variance)
            differences.append(seen.similarity - true.similarity)
            similarities.append(true.similarity)
            optimizer.step()
    for name, values in (
        ("noise, projected / exact", ratios),
        ("similarity, projected - exact", differences),
        ("similarity, exact", similarities),
    ):
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        print(f"{name}: mean {mean:.3f}, standard deviation {deviation:.3f}")


def _measured(
    model: nn.Module, meter: bb.GradientMeter, x: torch.Tensor, y: torch.Tensor
) -> GradientStatistics:
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    result = meter.read(samples=[len(y)])
    assert result is not None
    return result


if __name__ == "__main__":
    main()
