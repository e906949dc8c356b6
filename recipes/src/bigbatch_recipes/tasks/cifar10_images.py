"""Two ResNets for CIFAR-10: SimiGrad's of basic blocks, and VRGD's of three stages."""

from pathlib import Path

from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets import cifar10
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks, resnet_of_three_stages
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

_SIMIGRAD_STD = (0.2023, 0.1994, 0.2010)  # of SimiGrad's code; not the channels' own


def basic_blocks(settings: Settings) -> nn.Module:
    """A network of basic blocks, with SimiGrad's normalisation."""
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    network = resnet_of_basic_blocks(depth, width, cifar10.CLASSES)
    return image_classification.OfBytes(network, cifar10.MEAN, _SIMIGRAD_STD)


def three_stages(settings: Settings) -> nn.Module:
    """A network of three stages."""
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    network = resnet_of_three_stages(depth, width, cifar10.CLASSES)
    return image_classification.OfBytes(network, cifar10.MEAN, cifar10.STD)


def data(settings: Settings, *, gap: bool = False) -> Data:
    """Training data, and what scores a model."""
    return image_classification.data_of(*cifar10.read(Path(settings.data)), settings, gap=gap)


def data_with_gap(settings: Settings) -> Data:
    """The same, with scores of training images too."""
    return data(settings, gap=True)


def loss(settings: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch of augmented images."""
    smoothing = float(settings.task.get("label_smoothing", 0.0))
    return image_classification.class_loss(smoothing, image_classification.random_shift_and_flip)


example = image_classification.examples(3, 32)
