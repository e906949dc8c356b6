"""The networks of Fashion-MNIST, and its images."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets.idx_files import read_images
from bigbatch_recipes.datasets.locations import FASHION_MNIST
from bigbatch_recipes.models.resnet import resnet_of_three_stages
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings, require_choice

_SIZE, _CLASSES = 28, 10
_MEAN, _STD = (0.2860,), (0.3530,)  # of the training images


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    name = str(settings.task["network"])
    require_choice("network", name, _NETWORKS)
    return image_classification.OfBytes(_NETWORKS[name](settings), _MEAN, _STD)


def _resnet(settings: Settings) -> nn.Module:
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    return resnet_of_three_stages(depth, width, classes=_CLASSES, channels=1)


def _mlp(settings: Settings) -> nn.Module:
    hidden = settings.count("hidden")
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(_SIZE**2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, _CLASSES),
    )


def loss(_: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch."""
    return image_classification.class_loss()


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    train, test = read_images(Path(settings.data), FASHION_MNIST)
    return image_classification.data_of(train, test, settings, gap=bool(settings.task["gap"]))


example = image_classification.examples(1, _SIZE)
_NETWORKS: dict[str, Callable[[Settings], nn.Module]] = {"resnet": _resnet, "mlp": _mlp}
