"""Networks of known size for benchmarks: a transformer, wide layers."""

import torch
from torch import Tensor, nn


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.tokens(x))).flatten(0, 1)
        return logits


def transformer() -> nn.Module:
    """Six layers of width 512 over 256 tokens, 19.2 million parameters.

    Source:
        The encoder of the base model of Vaswani et al. 2017 (arXiv 1706.03762), without dropout.
    """
    return _Transformer(512, 6, 256)


def wide_layers() -> nn.Module:
    """Three square layers of width 1,280, 4.9 million parameters."""
    return nn.Sequential(
        nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280)
    )


def count(model: nn.Module) -> int:
    """Number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def random_batch(model: nn.Module, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels that fit one of these networks."""
    if isinstance(model, _Transformer):
        return torch.randint(256, (samples, length)), torch.randint(256, (samples * length,))
    if any(isinstance(layer, nn.Conv2d) for layer in model.modules()):
        return torch.randn(samples, 3, length, length), torch.randint(10, (samples,))
    return torch.randn(samples, 1280), torch.randint(1280, (samples,))
