"""The noise scale of a small GPT on tiny Shakespeare, as nanoGNS measures it.

nanoGNS prints one line for its character model after 250 steps of 64 windows. This module trains a
network of the same shape with the same settings, and `GradientMeter` measures it. The weights and
the order of the windows are others, since nothing that fixes them is published.

Source:
    github.com/CerebrasResearch/nanoGNS, exact/: README.md, train.py, model.py, gns-analysis.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from bigbatch.experiments.datasets.files import text_of
from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics

STEPS = 250  # 4,096,000 tokens, as the README states
BATCH, LENGTH = 64, 256  # windows of a step; characters of a window

_WIDTH, _DEPTH, _HEADS, _DROPOUT = 384, 6, 6, 0.2
_LR, _BETAS, _DECAY, _CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0
_WARMUP_TOKENS = 4000 * 12 * 5 * 8 * 1024  # the default of train.py
_TRAIN_SHARE = 0.9
_MICRO_BATCHES = 8
_WINDOW = -1 / math.log(0.95)  # steps, for weights of .95 to the power of the age


class _Block(nn.Module):
    """Causal attention and a GELU layer, each after a LayerNorm and with a residual; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH, bias=False)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.mix = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(_WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)
        self.drop = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """The states (samples, characters, width) of the next block."""
        samples, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(samples, length, 3, _HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        p = _DROPOUT if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.mix(attended.transpose(1, 2).reshape(samples, length, _WIDTH)))
        hidden = functional.gelu(self.up(self.norm_2(x)))
        return x + self.drop(self.down(hidden))


class ShakespeareGPT(nn.Module):
    """A GPT of 10.7 M parameters whose head is its character embedding.

    Args:
        characters: number of characters.
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, _WIDTH)
        self.positions = nn.Embedding(LENGTH, _WIDTH)
        self.drop = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(_WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * _DEPTH))
            elif weight.ndim > 1:
                nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of what follows each character, (samples, length, characters)."""
        positions = torch.arange(codes.shape[1]).expand_as(codes)
        x = self.drop(self.characters(codes) + self.positions(positions))
        return functional.linear(self.norm(self.blocks(x)), self.characters.weight)
