"""Noise and similarity of groups by random projections: unbiased, and how far they scatter."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bigbatch import GradientMeter

torch.set_num_threads(1)
K, STEPS = 8, 200


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.back(F.gelu(self.inner(self.inner_norm(x))))


class GPT(nn.Module):
    """Its head has the weight of its embedding."""

    def __init__(self, vocabulary=32, width=16, length=12):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(Block(width), Block(width)), nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight).transpose(1, 2)


class ResNet(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(3))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = F.relu(self.norms[0](self.first(x)))
        inner = F.relu(self.norms[1](self.convs[0](x)))
        x = F.relu(x + self.norms[2](self.convs[1](inner)))
        return self.head(x.mean((2, 3)))


def mlp():
    layers = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def sequences(draw):
    tokens = torch.randint(32, (16, 13), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def images(draw):
    return torch.randn(16, 3, 8, 8, generator=draw), torch.randint(10, (16,), generator=draw)


def vectors(draw):
    return torch.randn(32, 20, generator=draw), torch.randint(10, (32,), generator=draw)


TASKS = {"MLP": (mlp, vectors), "GPT": (GPT, sequences), "ResNet": (ResNet, images)}


def readings(task, **options):
    """(noise, similarity) of each step on new data, (steps, 2)."""
    make, data = TASKS[task]
    torch.manual_seed(0)
    model, read = make(), []
    with GradientMeter(model, groups=K, **options) as meter:
        for step in range(STEPS):
            model.zero_grad()
            x, y = data(torch.Generator().manual_seed(step))
            F.cross_entropy(model(x), y).backward()
            statistics = meter.read(samples=[len(x)])
            read.append((statistics.grad_variance, statistics.similarity))
    return torch.tensor(read, dtype=torch.float64)


@pytest.mark.parametrize(
    "task",
    [
        "MLP",
        pytest.param("GPT", marks=pytest.mark.thorough),
        pytest.param("ResNet", marks=pytest.mark.thorough),
    ],
)
def test_random_projections_are_unbiased_and_scatter_less_than_steps_do(task):
    exact, projected = readings(task, per_layer=True), readings(task)
    ratio = projected[:, 0] / exact[:, 0]
    assert pytest.approx(1, abs=4 * ratio.std().item() / math.sqrt(STEPS)) == ratio.mean().item()
    assert (projected - exact)[:, 1].std() < 0.5 * exact[:, 1].std()
    assert ratio.std() < 0.35  # of 8 signs for the rows, and of 8 x 8 for a convolution
