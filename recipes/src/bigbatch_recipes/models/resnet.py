"""Residual networks for images: with basic blocks, with three stages, with bottlenecks.

Each is a sequence stem, stage1, stage2, ..., mean, flat, head. Convolutions have no bias, and a
BatchNorm follows each. Width and depth set the size.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from bigbatch.errors import SettingError

_EXPANSION = 4  # output channels of a bottleneck over its width


def resnet_of_basic_blocks(
    depth: int = 18, width: int = 64, classes: int = 10, channels: int = 3
) -> nn.Module:
    """Four stages for images of 32 x 32: 11,173,962 parameters at depth 18.

    The stem is one 3 x 3 convolution; a shortcut that changes shape is a 1 x 1 convolution with its
    BatchNorm. The weights are torch's defaults.

    Source:
        He et al. 2015 (arXiv 1512.03385), as github.com/kuangliu/pytorch-cifar builds it.
    """
    blocks = _blocks_of(depth, {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)})
    return _network(_conv_bn(channels, width, 3), _basic, width, blocks, classes)


def resnet_of_three_stages(
    depth: int = 56, width: int = 16, classes: int = 10, channels: int = 3
) -> nn.Module:
    """6 n + 2 layers for images of 32 x 32: 853,018 parameters at depth 56.

    A shortcut that changes shape takes every second pixel and fills the new channels with zeros
    (the paper's option A, which has no parameters). The weights are He's.

    Raises:
        SettingError: the depth is another one.
    Source:
        He et al. 2015 (arXiv 1512.03385), section 4.2.
    """
    if depth < 8 or depth % 6 != 2:
        raise SettingError(f"depth={depth} must be 6 n + 2: 8, 14, 20, 32, 44, 56, ...")
    blocks = [(depth - 2) // 6] * 3
    return _with_he_weights(_network(_conv_bn(channels, width, 3), _padded, width, blocks, classes))


def resnet_of_bottlenecks(
    depth: int = 50, width: int = 64, classes: int = 1000, channels: int = 3
) -> nn.Module:
    """Four stages for images of 224 x 224: 25,557,032 parameters at depth 50.

    Version 1.5: it is the 3 x 3 convolution of a block that strides. The weights are He's.

    Source:
        He et al. 2015 (arXiv 1512.03385), with the stride where NVIDIA's ResNet50 v1.5 has it.
    """
    depths = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
    depths |= {101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    stem = [*_conv_bn(channels, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    blocks = _blocks_of(depth, depths)
    return _with_he_weights(
        _network(stem, _bottleneck, width, blocks, classes, expansion=_EXPANSION)
    )


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
        first = self.zeros // 2
        pixels = x[..., :: self.stride, :: self.stride]
        return functional.pad(pixels, (0, 0, 0, 0, first, self.zeros - first))


def _basic(in_channels: int, width: int, stride: int) -> nn.Module:
    return _Residual(
        _two_convs(in_channels, width, stride), _projection(in_channels, width, stride)
    )


def _padded(in_channels: int, width: int, stride: int) -> nn.Module:
    same = stride == 1 and in_channels == width
    shortcut = nn.Identity() if same else _Subsampled(stride, width - in_channels)
    return _Residual(_two_convs(in_channels, width, stride), shortcut)


def _bottleneck(in_channels: int, width: int, stride: int) -> nn.Module:
    out_channels = _EXPANSION * width
    body = [_conv_bn(in_channels, width, 1), _conv_bn(width, width, 3, stride)]
    body.append(_conv_bn(width, out_channels, 1, relu=False))
    return _Residual(_sequential(body), _projection(in_channels, out_channels, stride))


def _two_convs(in_channels: int, width: int, stride: int) -> nn.Module:
    return _sequential(
        [_conv_bn(in_channels, width, 3, stride), _conv_bn(width, width, 3, relu=False)]
    )


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return _sequential([_conv_bn(in_channels, out_channels, 1, stride, relu=False)])


def _conv_bn(
    in_channels: int, out_channels: int, size: int, stride: int = 1, *, relu: bool = True
) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
    norm = nn.BatchNorm2d(out_channels)
    return [convolution, norm, nn.ReLU(inplace=True)] if relu else [convolution, norm]


def _sequential(parts: Sequence[list[nn.Module]]) -> nn.Module:
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
    expansion: int = 1,
) -> nn.Module:
    """The parts by name; each stage after the first begins with a stride of 2."""
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*stem)}
    in_channels = width
    for stage, count in enumerate(blocks):
        layers = []
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(block(in_channels, width << stage, stride))
            in_channels = expansion * (width << stage)
        parts[f"stage{stage + 1}"] = nn.Sequential(*layers)
    parts |= {"mean": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    parts["head"] = nn.Linear(in_channels, classes)
    return nn.Sequential(OrderedDict(parts))


def _with_he_weights(network: nn.Module) -> nn.Module:
    """Initializes convolutions as He et al.: the variance of the forward pass is constant."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return network
