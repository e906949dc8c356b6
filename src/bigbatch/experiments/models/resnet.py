"""Residual networks for images: of basic blocks, of three thin stages, of bottlenecks.

Each is a sequence stem, stage1, stage2, ..., mean, flat, head. Convolutions have no
bias; every one is followed by a BatchNorm. A width and a depth make each as small as wanted.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from bigbatch.errors import SettingError

_BOTTLENECK = 4  # channels that a bottleneck gives, in its width


def resnet_of_basic_blocks(
    depth: int = 18, width: int = 64, classes: int = 10, channels: int = 3
) -> nn.Module:
    """Four stages for images of 32 x 32: 11,173,962 parameters at depth 18.

    The stem is one 3 x 3 convolution; a shortcut that changes shape is a 1 x 1 convolution with its
    BatchNorm. The weights are torch's defaults.

    Args:
        depth: 10, 18 or 34.
        width: channels of the first stage; each stage has twice those of the one before.
        classes: logits.
        channels: of an image.
    Raises:
        SettingError: another depth.
    Source:
        He et al. 2015 (arXiv 1512.03385), as github.com/kuangliu/pytorch-cifar builds it.
    Example:
        >>> network = resnet_of_basic_blocks()
        >>> sum(p.numel() for p in network.parameters())
        11173962
    """
    blocks = _blocks_of(depth, {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)})
    return _network(_normed(channels, width, 3), _basic, width, blocks, classes)


def resnet_of_three_stages(
    depth: int = 56, width: int = 16, classes: int = 10, channels: int = 3
) -> nn.Module:
    """6 n + 2 layers for images of 32 x 32: 853,018 parameters at depth 56.

    A shortcut that changes shape takes every second pixel and fills the new channels with zeros
    (the paper's option A, which has no parameters). The weights are He's.

    Args:
        depth: 8, 14, 20, ..., 56, ...
        width: channels of the first stage; each stage has twice those of the one before.
        classes: logits.
        channels: of an image.
    Raises:
        SettingError: another depth.
    Source:
        He et al. 2015 (arXiv 1512.03385), section 4.2.
    Example:
        >>> network = resnet_of_three_stages()
        >>> sum(p.numel() for p in network.parameters())
        853018
    """
    if depth < 8 or depth % 6 != 2:
        raise SettingError(f"depth={depth} must be 6 n + 2: 8, 14, 20, 32, 44, 56, ...")
    blocks = [(depth - 2) // 6] * 3
    return _with_he_weights(_network(_normed(channels, width, 3), _padded, width, blocks, classes))


def resnet_of_bottlenecks(
    depth: int = 50, width: int = 64, classes: int = 1000, channels: int = 3
) -> nn.Module:
    """Four stages for images of 224 x 224: 25,557,032 parameters at depth 50.

    Version 1.5: it is the 3 x 3 convolution of a block that strides. The weights are He's.

    Args:
        depth: 14, 26, 50, 101 or 152.
        width: of the first stage's 3 x 3 convolutions; each stage has twice that of the one before,
            and its blocks give four times their width.
        classes: logits.
        channels: of an image.
    Raises:
        SettingError: another depth.
    Source:
        He et al. 2015 (arXiv 1512.03385), with the stride where NVIDIA's ResNet50 v1.5 has it.
    Example:
        >>> network = resnet_of_bottlenecks()
        >>> sum(p.numel() for p in network.parameters())
        25557032
    """
    depths = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
    depths |= {101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    stem = [*_normed(channels, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    blocks = _blocks_of(depth, depths)
    return _with_he_weights(_network(stem, _bottleneck, width, blocks, classes, gives=_BOTTLENECK))


class _Residual(nn.Module):
    """relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class _Subsampled(nn.Module):
    """Every stride-th pixel, and channels of zeros, half of them at either end."""

    def __init__(self, stride: int, zeros: int) -> None:
        super().__init__()
        self.stride, self.zeros = stride, zeros

    def forward(self, x: Tensor) -> Tensor:
        before = self.zeros // 2
        picked = x[..., :: self.stride, :: self.stride]
        return functional.pad(picked, (0, 0, 0, 0, before, self.zeros - before))


def _basic(inside: int, width: int, stride: int) -> nn.Module:
    return _Residual(_two(inside, width, stride), _projection(inside, width, stride))


def _padded(inside: int, width: int, stride: int) -> nn.Module:
    same = stride == 1 and inside == width
    shortcut = nn.Identity() if same else _Subsampled(stride, width - inside)
    return _Residual(_two(inside, width, stride), shortcut)


def _bottleneck(inside: int, width: int, stride: int) -> nn.Module:
    outside = _BOTTLENECK * width
    body = [_normed(inside, width, 1), _normed(width, width, 3, stride)]
    body.append(_normed(width, outside, 1, relu=False))
    return _Residual(_joined(body), _projection(inside, outside, stride))


def _two(inside: int, width: int, stride: int) -> nn.Module:
    return _joined([_normed(inside, width, 3, stride), _normed(width, width, 3, relu=False)])


def _projection(inside: int, outside: int, stride: int) -> nn.Module:
    if stride == 1 and inside == outside:
        return nn.Identity()
    return _joined([_normed(inside, outside, 1, stride, relu=False)])


def _normed(
    inside: int, outside: int, size: int, stride: int = 1, *, relu: bool = True
) -> list[nn.Module]:
    """A convolution and what follows it."""
    convolution = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    norm = nn.BatchNorm2d(outside)
    return [convolution, norm, nn.ReLU(inplace=True)] if relu else [convolution, norm]


def _joined(parts: Sequence[list[nn.Module]]) -> nn.Module:
    return nn.Sequential(*(layer for part in parts for layer in part))


def _blocks_of(depth: int, depths: Mapping[int, Sequence[int]]) -> Sequence[int]:
    if depth not in depths:
        raise SettingError(f"depth={depth} must be one of {', '.join(map(str, depths))}")
    return depths[depth]


def _network(
    stem: list[nn.Module],
    block: Callable[[int, int, int], nn.Module],
    width: int,
    blocks: Sequence[int],
    classes: int,
    gives: int = 1,
) -> nn.Module:
    """The parts by name; every stage after the first begins with a stride of 2."""
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*stem)}
    inside = width
    for stage, count in enumerate(blocks):
        layers = []
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(block(inside, width << stage, stride))
            inside = gives * (width << stage)
        parts[f"stage{stage + 1}"] = nn.Sequential(*layers)
    parts |= {"mean": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    parts["head"] = nn.Linear(inside, classes)
    return nn.Sequential(OrderedDict(parts))


def _with_he_weights(network: nn.Module) -> nn.Module:
    """Convolutions that keep the variance going forwards, behind a relu."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return network
