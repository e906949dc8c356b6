"""A ResNet-18 for CIFAR-10, and SimiGrad's normalisation and augmentation."""

from pathlib import Path

from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets import cifar10
from bigbatch_recipes.models.resnet import resnet_of_basic_blocks
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

_STD = (0.2023, 0.1994, 0.2010)  # SimiGrad's code; not the channels' own


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    return image_classification.OfBytes(
        resnet_of_basic_blocks(depth, width, cifar10.CLASSES), cifar10.MEAN, _STD
    )


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    return image_classification.data_of(*cifar10.read(Path(settings.data)), settings)


def loss(_: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch of augmented images."""
    return image_classification.class_loss(augment=image_classification.random_shift_and_flip)


example = image_classification.examples(3, 32)
