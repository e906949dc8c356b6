"""Networks of known size for benchmarks: a transformer, wide layers."""

import torch
from torch import Tensor, nn


def transformer() -> nn.Module:
    """Six layers of width 512 over 256 tokens, 19.2 million parameters.

    Source:
        The encoder of the base model of Vaswani et al. 2017 (arXiv 1706.03762), without dropout.
    """
    embedding = nn.Embedding(256, 512)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(embedding, encoder, nn.Linear(512, 256), nn.Flatten(0, 1))


def wide_layers() -> nn.Module:
    """Three square layers of width 1,280, 4.9 million parameters."""
    return nn.Sequential(
        nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280)
    )


def count(model: nn.Module) -> int:
    """Number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


MicroBatches = list[tuple[Tensor, Tensor]]
"""Inputs and labels of micro-batches."""


def random_batch(model: nn.Module, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels that fit one of these networks."""
    layers = {type(layer) for layer in model.modules()}
    if nn.Embedding in layers:
        return torch.randint(256, (samples, length)), torch.randint(256, (samples * length,))
    if nn.Conv2d in layers:
        return torch.randn(samples, 3, length, length), torch.randint(10, (samples,))
    return torch.randn(samples, 1280), torch.randint(1280, (samples,))
