"""A ResNet of three stages for CIFAR-10, with scores of training images too."""

from pathlib import Path

from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets import cifar10
from bigbatch_recipes.models.resnet import resnet_of_three_stages
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    network = resnet_of_three_stages(depth, width, cifar10.CLASSES)
    return image_classification.OfBytes(network, cifar10.MEAN, cifar10.STD)


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    return image_classification.data_of(*cifar10.read(Path(settings.data)), settings, gap=True)


def loss(settings: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch of augmented images."""
    return image_classification.class_loss(
        float(settings.task["label_smoothing"]), image_classification.random_shift_and_flip
    )


example = image_classification.examples(3, 32)
