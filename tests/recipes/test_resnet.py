"""Residual networks: their size, their shapes, and He's start."""

import math

import pytest
import torch
from torch import nn

from bigbatch.errors import SettingError
from bigbatch_recipes.models.resnet import (
    resnet_of_basic_blocks,
    resnet_of_bottlenecks,
    resnet_of_three_stages,
)

BUILDERS = (resnet_of_basic_blocks, resnet_of_three_stages, resnet_of_bottlenecks)


@pytest.mark.parametrize(
    ("build", "depth", "parameters"),
    [
        (resnet_of_basic_blocks, 18, 11_173_962),
        (resnet_of_basic_blocks, 34, 21_282_122),
        (resnet_of_three_stages, 20, 269_722),
        (resnet_of_three_stages, 56, 853_018),
        (resnet_of_three_stages, 110, 1_727_962),
        (resnet_of_bottlenecks, 50, 25_557_032),
        (resnet_of_bottlenecks, 101, 44_549_160),
    ],
)
def test_the_networks_have_the_published_sizes(build, depth, parameters):
    with torch.device("meta"):
        network = build(depth)
    assert parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("build", "depth", "size", "last"),
    [
        (resnet_of_basic_blocks, 10, 32, (32, 4, 4)),
        (resnet_of_three_stages, 14, 32, (16, 8, 8)),
        (resnet_of_bottlenecks, 14, 64, (128, 2, 2)),
        (resnet_of_bottlenecks, 26, 224, (128, 7, 7)),
    ],
)
def test_images_become_smaller_and_channels_more_on_the_way(build, depth, size, last):
    network = build(depth, width=4, classes=7, channels=1)
    x = torch.randn(2, 1, size, size)
    for layer in network[:-3]:
        x = layer(x)
    assert (2, *last) == x.shape
    assert (2, 7) == network[-3:](x).shape


@pytest.mark.parametrize(("build", "depth"), [(build, 17) for build in BUILDERS])
def test_a_depth_that_there_is_not_is_an_error(build, depth):
    with pytest.raises(SettingError, match="depth=17 must be"):
        build(depth)


def test_a_shortcut_without_parameters_takes_every_second_pixel():
    network = resnet_of_three_stages(8, width=2)
    shortcut = network.stage2[0].shortcut
    x = torch.arange(2 * 16.0).reshape(1, 2, 4, 4)
    assert [] == list(shortcut.parameters())
    found = shortcut(x)
    assert (1, 4, 2, 2) == found.shape
    assert torch.equal(x[:, :, ::2, ::2], found[:, 1:3])
    assert 0 == found[:, [0, 3]].abs().sum()


def test_the_three_by_three_convolution_of_a_bottleneck_strides():
    strides = {
        layer.kernel_size: layer.stride
        for layer in resnet_of_bottlenecks(14, width=4).stage2[0].body
        if isinstance(layer, nn.Conv2d)
    }
    assert {(1, 1): (1, 1), (3, 3): (2, 2)} == strides


def test_hes_weights_have_the_variance_of_two_over_the_fan():
    torch.manual_seed(0)
    weight = resnet_of_three_stages(8, width=32).stage2[0].body[0].weight
    assert pytest.approx(math.sqrt(2 / (32 * 9)), rel=0.02) == weight.std().item()
