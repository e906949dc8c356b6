"""Networks of known size to measure on: ResNet-18, a transformer, layers of any width."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        same = stride == 1 and inside == outside
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32 pictures, 11.2 million parameters.

    Source:
        He et al. 2015 (arXiv 1512.03385), with the stem that is usual for CIFAR.
    """
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [
        _Block(inside, outside, 1 if inside == outside else 2)
        for inside, outside in itertools.pairwise(widths)
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *blocks, *head)


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.tokens(x))).flatten(0, 1)
        return out


def transformer() -> nn.Module:
    """Six layers of width 512 over 256 tokens, 19.2 million parameters.

    Source:
        The encoder of the base model of Vaswani et al. 2017 (arXiv 1706.03762), without dropout.
    """
    return _Transformer(512, 6, 256)


def wide_layers() -> nn.Module:
    """Three square layers of width 1,280, 4.9 million parameters, one position a sample."""
    return nn.Sequential(
        nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 1280)
    )


def count(model: nn.Module) -> int:
    """Parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def random_batch(model: nn.Module, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels that fit one of these networks."""
    if isinstance(model, _Transformer):
        return torch.randint(256, (samples, length)), torch.randint(256, (samples * length,))
    if isinstance(model[0], nn.Conv2d):  # type: ignore[index]
        return torch.randn(samples, 3, length, length), torch.randint(10, (samples,))
    return torch.randn(samples, 1280), torch.randint(1280, (samples,))
