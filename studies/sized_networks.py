"""Networks of known size for studies: GPTs, wide layers, a small CNN."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

MicroBatches = list[tuple[Tensor, Tensor]]
"""Inputs and labels of micro-batches."""


class GPT(nn.Module):
    """A causal transformer with learned positions and a tied output layer, without dropout.

    Args:
        layers: number of layers.
        width: width of a layer, a multiple of 64; its hidden layer has four times that.
        tokens: size of the vocabulary.
        length: largest number of tokens of a sample.
    """

    def __init__(self, layers: int, width: int, tokens: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # larger logits leave subnormal gradients

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, (samples, length, tokens)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.embedding.weight)


class _Block(nn.Module):
    """Attention with heads of 64, and a hidden layer of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(samples, length, width) to the same."""
        samples, length, width = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(samples, length, 3, self.heads, 64)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(read.transpose(1, 2).reshape(samples, length, width))
        output: Tensor = hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return output


def readme_network(inputs: int = 64) -> nn.Module:
    """A hidden layer of 128 and ten classes, for inputs of any shape."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 10))


def wide_layers() -> nn.Module:
    """Three square layers of width 1,280, 4.9 million parameters."""
    return nn.Sequential(
        nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280)
    )


def small_cnn() -> nn.Module:
    """Three convolutions for images of 3 x 32 x 32, 0.1 million parameters; no BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (len(layers) < 6)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10))


def with_group_norm(model: nn.Module) -> nn.Module:
    """The model, with GroupNorm of 8 channels a group in the place of BatchNorm."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(channels // 8, channels))
    return model


def count(model: nn.Module) -> int:
    """Number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def random_batch(model: nn.Module, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels that fit one of these networks, with 256 tokens, or a ResNet."""
    layers = {type(layer) for layer in model.modules()}
    if nn.Embedding in layers:
        return torch.randint(256, (samples, length)), torch.randint(256, (samples, length))
    if nn.Conv2d in layers:
        return torch.randn(samples, 3, length, length), torch.randint(10, (samples,))
    return torch.randn(samples, 1280), torch.randint(1280, (samples,))


def mean_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of all labels of a batch."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
