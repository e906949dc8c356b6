"""Networks of known size for benchmarks: transformers, wide layers, a small CNN."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


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


def small_cnn() -> nn.Module:
    """Three convolutions for images of 3 x 32 x 32, 0.1 million parameters; no BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )


def with_group_norm(model: nn.Module) -> nn.Module:
    """The model, with GroupNorm of 8 channels a group in the place of BatchNorm."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(channels // 8, channels))
    return model


class TiedTransformer(nn.Module):
    """A transformer encoder whose output layer is its embedding, without dropout.

    Args:
        layers: number of layers.
        width: width of a layer, a multiple of 64; its hidden layer has four times that.
        tokens: size of the vocabulary.
    """

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, (samples x length, tokens)."""
        hidden = self.encoder(self.embedding(tokens))
        return functional.linear(hidden, self.embedding.weight).flatten(0, 1)


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


def mean_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of such a batch; labels of positions may be (samples, length)."""
    return functional.cross_entropy(model(x), y.flatten())
